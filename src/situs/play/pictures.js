// Pictures as bytes [H, W, C], as canvases and from files.

"use strict";

/** A picture's bytes as a canvas of the model's size. */
function canvasOf(pixels, { size, channels }) {
  const canvas = document.createElement("canvas");
  [canvas.height, canvas.width] = size;
  const image = canvas.getContext("2d").createImageData(size[1], size[0]);
  for (let n = 0; n < size[0] * size[1]; n++) {
    for (let c = 0; c < 3; c++) image.data[4 * n + c] = pixels[n * channels + (channels < 3 ? 0 : c)];
    image.data[4 * n + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** The patch whose pixels differ most: one with something to see. without: patches that are not meant. */
function richest(pixels, { grid, patch, size, channels }, without) {
  const sums = Array.from({ length: grid[0] * grid[1] }, () => [0, 0]);
  pixels.forEach((value, n) => {
    const [row, column] = [Math.floor(n / channels / size[1]), Math.floor(n / channels) % size[1]];
    const of = sums[Math.floor(row / patch[0]) * grid[1] + Math.floor(column / patch[1])];
    of[0] += value;
    of[1] += value * value;
  });
  const each = patch[0] * patch[1] * channels;
  const spread = sums.map(([sum, squares], n) => (without.includes(n) ? -1 : squares / each - (sum / each) ** 2));
  return spread.indexOf(Math.max(...spread));
}

/** The middle of a file's picture, brought to the model's size in halves so that no detail flickers: its bytes. */
async function pixelsOf(file, { size, channels }) {
  const image = await createImageBitmap(file);
  const share = Math.min(image.height / size[0], image.width / size[1]);
  let [high, wide] = [size[0] * share, size[1] * share];
  let [left, top, from] = [(image.width - wide) / 2, (image.height - high) / 2, image];
  let pen = null;
  do {
    const [h, w] = [Math.max(size[0], high / 2), Math.max(size[1], wide / 2)].map(Math.round);
    const canvas = document.createElement("canvas");
    [canvas.height, canvas.width] = [h, w];
    pen = canvas.getContext("2d", { willReadFrequently: true });
    pen.imageSmoothingQuality = "high";
    pen.drawImage(from, left, top, wide, high, 0, 0, w, h);
    [left, top, from, high, wide] = [0, 0, canvas, h, w];
  } while (high !== size[0] || wide !== size[1]);
  const data = pen.getImageData(0, 0, size[1], size[0]).data;
  const pixels = new Uint8Array(size[0] * size[1] * channels);
  for (let n = 0; n < size[0] * size[1]; n++) {
    const [r, g, b] = data.subarray(4 * n, 4 * n + 3);
    if (channels === 1) pixels[n] = Math.round(0.299 * r + 0.587 * g + 0.114 * b);
    else pixels.set([r, g, b], 3 * n);
  }
  return pixels;
}
