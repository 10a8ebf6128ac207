// A vision transformer in plain JavaScript. All arrays are flat and row by row; a matrix [n, m] has its shape beside it.

"use strict";

/** The bytes behind a string of base64. */
function bytesOf(text) {
  const found = atob(text.trim());
  const bytes = new Uint8Array(found.length);
  for (let i = 0; i < found.length; i++) bytes[i] = found.charCodeAt(i);
  return bytes;
}

/** The tensors of `places` ({name: [first byte, shape, in 16 bits]}) as {name: {data, shape}}; see pack.py. */
function readTensors(bytes, places) {
  const tensors = {};
  for (const [name, [at, shape, short]] of Object.entries(places)) {
    const count = shape.reduce((a, b) => a * b, 1);
    if (!short) {
      tensors[name] = { data: new Float32Array(bytes.buffer, at, count), shape };
      continue;
    }
    const [rows, width] = [shape[0], count / shape[0]];
    const steps = new Float32Array(bytes.buffer, at, rows);
    const whole = new Int16Array(bytes.buffer, at + 4 * rows, count);
    const data = new Float32Array(count);
    for (let i = 0; i < count; i++) data[i] = whole[i] * steps[(i / width) | 0];
    tensors[name] = { data, shape };
  }
  return tensors;
}

/** The integral behind GELU, to 1.5e-7 (Abramowitz and Stegun, 7.1.26). */
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  const y = 1 - poly * Math.exp(-x * x);
  return x < 0 ? -y : y;
}

/** Numbers from a seed, each in [0, 1): the same on every machine. */
function randomFrom(seed) {
  let state = (seed * 2654435761 + 1013904223) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** A random order of 0 … count - 1. */
function shuffled(count, seed) {
  const next = randomFrom(seed);
  const order = Array.from({ length: count }, (_, i) => i);
  for (let i = count - 1; i > 0; i--) {
    const j = Math.floor(next() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

/** exp(x) over its sum, for `count` numbers from `start` on. */
function softmax(x, start = 0, count = x.length) {
  let most = -Infinity;
  for (let i = start; i < start + count; i++) most = Math.max(most, x[i]);
  let sum = 0;
  const found = new Float32Array(count);
  for (let i = 0; i < count; i++) sum += found[i] = Math.exp(x[start + i] - most);
  for (let i = 0; i < count; i++) found[i] /= sum;
  return found;
}

class Vit {
  /** about: what pack.py says of the model; tensors: by its names. */
  constructor(about, tensors) {
    Object.assign(this, { about, tensors });
    this.count = about.grid[0] * about.grid[1];
    this.key = null; // {order, back}: how channels go into the blocks and come out, where these are locked
  }

  /** x [rows, in] -> [rows, out], four rows at a time. */
  linear(x, rows, name) {
    const { data: w, shape } = this.tensors[`${name}.weight`];
    const bias = this.tensors[`${name}.bias`]?.data;
    const [out, width] = shape;
    const y = new Float32Array(rows * out);
    for (let r = 0; r < rows; r += 4) {
      const [a, b, c, d] = [0, 1, 2, 3].map((k) => Math.min(r + k, rows - 1) * width);
      for (let o = 0; o < out; o++) {
        const row = o * width;
        const start = bias ? bias[o] : 0;
        let [p, q, s, t] = [start, start, start, start];
        for (let i = 0; i < width; i++) {
          const weight = w[row + i];
          p += weight * x[a + i];
          q += weight * x[b + i];
          s += weight * x[c + i];
          t += weight * x[d + i];
        }
        y[r * out + o] = p;
        if (r + 1 < rows) y[(r + 1) * out + o] = q;
        if (r + 2 < rows) y[(r + 2) * out + o] = s;
        if (r + 3 < rows) y[(r + 3) * out + o] = t;
      }
    }
    return y;
  }

  /** Layer norm over rows as wide as its weight; x itself where the model has no such norm. */
  norm(x, name) {
    const weight = this.tensors[`${name}.weight`]?.data;
    if (!weight) return x;
    const bias = this.tensors[`${name}.bias`]?.data;
    const [width, eps] = [weight.length, this.about.eps[name]];
    const y = new Float32Array(x.length);
    for (let at = 0; at < x.length; at += width) {
      let [sum, squares] = [0, 0];
      for (let i = 0; i < width; i++) sum += x[at + i];
      const mean = sum / width;
      for (let i = 0; i < width; i++) squares += (x[at + i] - mean) ** 2;
      const scale = 1 / Math.sqrt(squares / width + eps);
      for (let i = 0; i < width; i++) y[at + i] = (x[at + i] - mean) * scale * weight[i] + (bias ? bias[i] : 0);
    }
    return y;
  }

  /** z [rows, D] after one pre-norm block. keys: the rows that serve as keys and values. watch: {row, seen}, where
   * `seen` [rows] receives what that row attends to, mean over the heads. */
  block(z, rows, name, heads, keys, watch) {
    const mixed = this.attend(this.norm(z, `${name}.norm1`), rows, name, heads, keys, watch);
    z = this.add(z, this.linear(mixed, rows, `${name}.proj`), `${name}.scale1`);
    const hidden = this.linear(this.norm(z, `${name}.norm2`), rows, `${name}.fc1`);
    const relu = this.about.act === "relu" && !name.startsWith("decoder");
    for (let i = 0; i < hidden.length; i++) {
      hidden[i] *= relu ? hidden[i] > 0 : 0.5 * (1 + erf(hidden[i] * Math.SQRT1_2));
    }
    return this.add(z, this.linear(hidden, rows, `${name}.fc2`), `${name}.scale2`);
  }

  /** z + scale · y, where the model scales what a branch adds (LayerScale). */
  add(z, y, scale) {
    const by = this.tensors[scale]?.data;
    const sum = new Float32Array(z.length);
    for (let i = 0; i < z.length; i++) sum[i] = z[i] + (by ? by[i % by.length] : 1) * y[i];
    return sum;
  }

  attend(x, rows, name, heads, keys, watch) {
    const qkv = this.linear(x, rows, `${name}.qkv`);
    const width = qkv.length / rows / 3;
    const d = width / heads;
    const part = (third) => {
      const y = new Float32Array(rows * width);
      for (let r = 0; r < rows; r++) y.set(qkv.subarray((3 * r + third) * width, (3 * r + third + 1) * width), r * width);
      return y;
    };
    const [q, k, v] = [this.norm(part(0), `${name}.q_norm`), this.norm(part(1), `${name}.k_norm`), part(2)];
    const y = new Float32Array(rows * width);
    const scores = new Float32Array(keys.length);
    for (let h = 0; h < heads; h++) {
      for (let r = 0; r < rows; r++) {
        const at = r * width + h * d;
        for (let j = 0; j < keys.length; j++) {
          const other = keys[j] * width + h * d;
          let dot = 0;
          for (let i = 0; i < d; i++) dot += q[at + i] * k[other + i];
          scores[j] = dot / Math.sqrt(d);
        }
        const shares = softmax(scores);
        for (let j = 0; j < keys.length; j++) {
          const other = keys[j] * width + h * d;
          for (let i = 0; i < d; i++) y[at + i] += shares[j] * v[other + i];
          if (watch && watch.row === r) watch.seen[keys[j]] += shares[j] / heads;
        }
      }
    }
    return y;
  }

  /** The tokens of some patches of an image (bytes, [H, W, C]), [patches, D]. */
  embed(pixels, patches) {
    const { size, patch, grid, channels, mean, std } = this.about;
    const [high, wide] = patch;
    const values = high * wide * channels;
    const x = new Float32Array(patches.length * values);
    patches.forEach((place, n) => {
      const [top, left] = [Math.floor(place / grid[1]) * high, (place % grid[1]) * wide];
      for (let i = 0; i < values; i++) {
        const c = i % channels;
        const column = Math.floor(i / channels) % wide;
        const row = Math.floor(i / channels / wide);
        const pixel = pixels[((top + row) * size[1] + left + column) * channels + c];
        x[n * values + i] = (pixel / 255 - mean[c]) / std[c];
      }
    });
    return this.norm(this.linear(x, patches.length, "embed"), "embed.norm");
  }

  /** Tokens [n, D] through the transformer, prefix in front: [prefix + n, D].
   * places: for each token the place it is told, -1 for the learned unknown one; null where none is told any.
   * keys: which of the tokens are attended to (null: all); prefix tokens always are. */
  encode(tokens, count, { places = null, keys = null, watch = null }) {
    const { dim, prefix, depth, heads } = this.about;
    const rows = prefix + count;
    let z = new Float32Array(rows * dim);
    if (prefix) z.set(this.tensors.prefix.data);
    z.set(tokens, prefix * dim);
    const table = places && this.tensors.table?.data;
    if (table) {
      const unknown = this.tensors.unknown?.data;
      places.forEach((place, n) => {
        for (let i = 0; i < dim; i++) {
          z[(prefix + n) * dim + i] += place < 0 ? (unknown ? unknown[i] : 0) : table[place * dim + i];
        }
      });
    }
    const chosen = keys ?? Array.from({ length: count }, (_, n) => n);
    const own = Array.from({ length: prefix }, (_, n) => n);
    const rowsOfKeys = Int32Array.from([...own, ...chosen.map((n) => prefix + n)]);
    z = this.turned(this.norm(z, "enter"), this.key?.order);
    for (let n = 0; n < depth; n++) {
      z = this.block(z, rows, `blocks.${n}`, heads, rowsOfKeys, n === depth - 1 ? watch : null);
    }
    return this.norm(this.turned(z, this.key?.back), "norm");
  }

  /** The channels of z in another order, y[j] = z[order[j]]; z itself where there is none. */
  turned(z, order) {
    if (!order) return z;
    const y = new Float32Array(z.length);
    for (let at = 0; at < z.length; at += order.length) {
      for (let j = 0; j < order.length; j++) y[at + j] = z[at + order[j]];
    }
    return y;
  }

  /** MP3: where each of all patches was, by content alone, [count, count]. context: the patches that all attend to. */
  places(pixels, context) {
    const { dim, prefix } = this.about;
    const every = Array.from({ length: this.count }, (_, n) => n);
    const z = this.encode(this.embed(pixels, every), this.count, { keys: context });
    return this.linear(z.subarray(prefix * dim), this.count, "place");
  }

  /** DropPos: where the patches behind the first `told` were, [patches - told, count]. places: what those are told. */
  dropped(pixels, patches, places, told) {
    const { dim, prefix, decoder } = this.about;
    const rows = prefix + patches.length;
    const said = patches.map((_, n) => (n < told ? places[n] : -1));
    let z = this.encode(this.embed(pixels, patches), patches.length, { places: said });
    z = this.linear(z, rows, "decoder.enter");
    const keys = Int32Array.from({ length: rows }, (_, n) => n);
    for (let n = 0; n < decoder.depth; n++) z = this.block(z, rows, `decoder.${n}`, decoder.heads, keys, null);
    const width = z.length / rows;
    const asked = this.norm(z.subarray((prefix + told) * width), "decoder.norm");
    return this.linear(asked, patches.length - told, "decoder.leave");
  }

  /** The classifier's logits. board: which patch stands at each place. hidden: places that are not told. */
  classes(pixels, board, hidden = [], watch = null) {
    const { dim, prefix, pool, told } = this.about;
    const places = told ? board.map((_, place) => (hidden.includes(place) ? -1 : place)) : null;
    const z = this.encode(this.embed(pixels, board), this.count, { places, watch });
    if (pool === "both") {
      const first = this.linear(z.subarray(0, dim), 1, "head");
      const second = this.linear(z.subarray(dim, 2 * dim), 1, "head_dist");
      return first.map((value, i) => (value + second[i]) / 2);
    }
    let read = z.subarray(0, dim);
    if (pool === "avg") {
      read = new Float32Array(dim);
      for (let i = prefix * dim; i < z.length; i++) read[i % dim] += z[i] / this.count;
    }
    return this.linear(this.norm(read, "pool"), 1, "head");
  }

  /** The same model with the channels of its blocks permuted, as one without the key runs it, and as one with it.
   * Norms, scales and what writes to the stream are permuted in their rows, what reads from it in its columns. */
  locked(seed) {
    const order = shuffled(this.about.dim, seed);
    const back = order.map(() => 0);
    order.forEach((from, to) => (back[from] = to));
    const tensors = { ...this.tensors };
    for (const [name, { data, shape }] of Object.entries(this.tensors)) {
      const part = name.match(/^blocks\.\d+\.(.+)$/)?.[1];
      if (!part || /^(q_norm|k_norm|qkv\.bias|fc1\.bias)/.test(part)) continue;
      const read = /^(qkv|fc1)\.weight$/.test(part);
      const width = read || shape.length === 1 ? 1 : shape[1];
      const moved = new Float32Array(data.length);
      for (let i = 0; i < data.length; i += width) {
        const at = Math.floor(i / width);
        const from = read ? at - (at % order.length) + order[at % order.length] : order[at];
        moved.set(data.subarray(from * width, (from + 1) * width), i);
      }
      tensors[name] = { data: moved, shape };
    }
    const [without, given] = [new Vit(this.about, tensors), new Vit(this.about, tensors)];
    given.key = { order, back };
    return [without, given];
  }
}
