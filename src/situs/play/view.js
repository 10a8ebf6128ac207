// What the page shows of an answer: the picture put together, the classes, the heat map of the chosen patch.

"use strict";

class View {
  constructor(play) {
    this.play = play;
  }

  all() {
    if (!this.play.found) return;
    if (this.play.about.kind === "classes") this.classes();
    else this.guess();
    this.chosen();
  }

  /** A clean canvas whose cells are whole pixels: its pen, the size of a cell, and the page's colours. */
  sheet(id) {
    const { size, grid } = this.play.about;
    const canvas = this.play.by(id);
    const zoom = Math.max(1, Math.round(640 / Math.max(...size)));
    [canvas.height, canvas.width] = [size[0] * zoom, size[1] * zoom];
    const pen = canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    const style = getComputedStyle(document.body);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const [high, wide] = [canvas.height / grid[0], canvas.width / grid[1]];
    const box = (place) => [(place % grid[1]) * wide, Math.floor(place / grid[1]) * high, wide, high];
    return { canvas, pen, colour, box, line: Math.max(2, wide / 22) };
  }

  piece({ pen, box }, patch, place) {
    const [high, wide] = this.play.about.patch;
    const columns = this.play.about.grid[1];
    pen.drawImage(this.play.picture, (patch % columns) * wide, Math.floor(patch / columns) * high, wide, high, ...box(place));
  }

  frame({ pen, box }, place, colour, line) {
    const [x, y, w, h] = box(place);
    [pen.strokeStyle, pen.lineWidth] = [colour, line];
    pen.strokeRect(x + line / 2, y + line / 2, w - line, h - line);
  }

  guess() {
    const sheet = this.sheet("guess");
    const { pen, canvas, colour, box, line } = sheet;
    pen.fillStyle = colour("empty");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    for (let place = 0; place < this.play.count; place++) this.hatch(sheet, place);
    const told = this.play.about.kind === "dropped" ? this.play.visible() : [[], 0];
    const known = told[0].slice(0, told[1]);
    const sorted = [...this.play.guesses].sort((a, b) => a[1].sure - b[1].sure); // the surest is drawn last, on top
    for (const patch of known) this.piece(sheet, patch, this.play.board.order.indexOf(patch));
    for (const [patch, { place }] of sorted) {
      this.piece(sheet, patch, place);
      if (patch !== place) this.frame(sheet, place, colour("bad"), line);
    }
    for (const patch of known) this.frame(sheet, this.play.board.order.indexOf(patch), colour("accent"), line);
    const right = sorted.filter(([patch, { place }]) => patch === place).length;
    const sure = sorted.reduce((sum, [, guess]) => sum + guess.sure, 0) / (sorted.length || 1);
    const [headline, detail] = [this.play.by("headline"), this.play.by("detail")];
    headline.innerHTML = `${right} of ${sorted.length}<span>${sorted.length === 1 ? "patch" : "patches"} put right</span>`;
    detail.textContent = `Certainty ${percent(sure)} on average. By chance 1 of ${this.play.count} would be right.`;
    canvas.setAttribute("aria-label", `The picture as the model puts it together: ${right} of ${sorted.length} right`);
  }

  hatch({ pen, box, colour }, place) {
    const [x, y, w, h] = box(place);
    pen.save();
    pen.beginPath();
    pen.rect(x, y, w, h);
    pen.clip();
    [pen.strokeStyle, pen.lineWidth] = [colour("hatch"), 1.5];
    for (let n = -h; n < w; n += 9) {
      pen.beginPath();
      pen.moveTo(x + n, y + h);
      pen.lineTo(x + n + h, y);
      pen.stroke();
    }
    pen.restore();
  }

  classes() {
    const { classes, multi } = this.play.about;
    const sorted = [...this.play.found.shares].map((share, n) => [share, n]).sort((a, b) => b[0] - a[0]);
    this.play.by("headline").innerHTML = `${percent(sorted[0][0])}<span></span>`;
    this.play.by("headline").lastChild.textContent = classes[sorted[0][1]];
    const really = this.play.label === null ? "" : `It is: ${classes[this.play.label]}. `;
    this.play.by("detail").textContent = really + (multi ? "Each class has a share of its own." : "");
    const rows = sorted.slice(0, 10).map(([share, n]) => bar(classes[n], share, n === this.play.label ? "good" : "accent"));
    this.play.by("bars").replaceChildren(...rows);
  }

  chosen() {
    if (!this.play.found) return;
    const sheet = this.sheet("heat");
    const { pen, canvas, colour, box, line } = sheet;
    const patch = this.play.board.order[this.play.board.at];
    const classes = this.play.about.kind === "classes";
    const shares = classes ? this.seen() : this.play.guesses.get(patch)?.shares;
    pen.globalAlpha = 0.3;
    for (let place = 0; place < this.play.count; place++) this.piece(sheet, classes ? this.play.board.order[place] : place, place);
    pen.globalAlpha = 1;
    const most = shares ? Math.max(...shares) : 1;
    shares?.forEach((share, place) => {
      pen.globalAlpha = 0.92 * Math.sqrt(share / most);
      pen.fillStyle = colour("heat");
      pen.fillRect(...box(place));
    });
    pen.globalAlpha = 1;
    this.frame(sheet, classes ? this.play.board.at : patch, colour("ink"), 1.6 * line);
    const words = classes ? this.attended(shares) : this.placed(patch);
    if (!classes && shares) {
      const [x, y, w, h] = box(this.play.guesses.get(patch).place);
      [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [colour("paper"), colour("ink"), line];
      pen.beginPath();
      pen.arc(x + w / 2, y + h / 2, Math.min(w, h) / 6, 0, 7);
      pen.fill();
      pen.stroke();
    }
    this.play.by("chosen").textContent = words;
    canvas.setAttribute("aria-label", words);
  }

  /** What the chosen patch attends to in the last block, by place. */
  seen() {
    const { prefix } = this.play.about;
    const watch = { row: prefix + this.play.board.at, seen: new Float32Array(prefix + this.play.count) };
    this.play.answer(this.play.model, this.play.pixels, this.play.board.order, this.play.seed, watch);
    return watch.seen.subarray(prefix);
  }

  attended(shares) {
    const sum = shares.reduce((a, b) => a + b, 0);
    const best = shares.indexOf(Math.max(...shares));
    const rest = this.play.about.prefix ? ` ${percent(1 - sum)} of its look goes to the class token.` : "";
    return `The patch at ${this.play.board.where(this.play.board.at)} looks most at ${this.play.board.where(best)}.${rest}`;
  }

  placed(patch) {
    const guess = this.play.guesses.get(patch);
    const was = `It was at ${this.play.board.where(patch)}.`;
    if (!guess) return `${was} ${this.play.kinds()[patch] === "told" ? "It is told a place, and not asked." : "It is hidden."}`;
    const right = guess.place === patch ? "rightly" : "wrongly";
    const second = [...guess.shares].map((share, place) => [share, place]).sort((a, b) => b[0] - a[0])[1];
    const next = second ? ` Next: ${this.play.board.where(second[1])}, ${percent(second[0])}.` : "";
    return `${was} The model says ${right}: ${this.play.board.where(guess.place)}, ${percent(guess.sure)} sure.${next}`;
  }
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

/** A row of bars: a name, a bar, a number. */
function bar(name, share, tone) {
  const row = document.createElement("div");
  row.className = `bar ${tone}`;
  const parts = { dt: name, i: "", dd: percent(share) };
  for (const [tag, text] of Object.entries(parts)) {
    const part = document.createElement(tag);
    part.textContent = text;
    row.append(part);
  }
  row.children[1].style.setProperty("--share", Math.max(share, 0.004));
  return row;
}
