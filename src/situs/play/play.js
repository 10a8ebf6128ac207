// The page itself: a model, a picture, a board, and what the model is told.

"use strict";

const SHOWN = 10; // built-in pictures to choose from

class Play {
  constructor() {
    const text = (id) => document.getElementById(id).textContent;
    this.about = JSON.parse(text("about"));
    this.model = new Vit(this.about, readTensors(bytesOf(text("weights")), this.about.tensors));
    this.count = this.model.count;
    const all = bytesOf(text("pixels"));
    const each = all.length / this.about.images;
    this.pictures = Array.from({ length: this.about.images }, (_, n) => all.subarray(n * each, (n + 1) * each));
    this.seed = 1; // of which patches the model is shown
    this.moves = 1; // of how they are shuffled
    this.told = {}; // what the sliders say, in patches
    this.by = (id) => document.getElementById(id);
    this.say = (words) => (this.by("say").textContent = words);
    const [onChange, onChoose] = [() => this.asked(), () => this.view.chosen()];
    this.board = new Board(this.by("board"), this.about, { onChange, onChoose, say: this.say });
    this.view = new View(this);
    this.lock = new Lock(this);
    this.makeStrip();
    this.makeSliders();
    this.makeButtons();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.view.all());
    this.take(this.pictures[0], 0);
    this.setShuffled(this.about.kind === "classes" ? 0 : this.count);
    this.board.choose(this.board.order.indexOf(richest(this.pixels, this.about, this.fixed())));
    this.lock.measure();
  }

  // --- pictures

  take(pixels, number) {
    this.pixels = pixels;
    this.picture = canvasOf(pixels, this.about);
    this.label = number === null ? null : (this.about.labels?.[number] ?? null);
    [...this.by("strip").children].forEach((each, n) => each.setAttribute("aria-pressed", n === number));
    this.by("own")?.classList.toggle("used", number === null);
    this.board.show(this.picture);
    this.asked();
  }

  makeStrip() {
    this.pictures.slice(0, SHOWN).forEach((pixels, n) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "thumb";
      const named = this.about.labels ? `: ${this.about.classes[this.about.labels[n]]}` : "";
      button.setAttribute("aria-label", `Picture ${n + 1}${named}`);
      button.append(canvasOf(pixels, this.about));
      button.addEventListener("click", () => this.take(pixels, n));
      this.by("strip").append(button);
    });
    if (![1, 3].includes(this.about.channels)) return this.by("own").remove();
    this.by("file").addEventListener("change", (event) => this.read(event.target.files[0]));
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      this.read(event.dataTransfer.files[0]);
    });
  }

  async read(file) {
    if (!file) return;
    const pixels = await pixelsOf(file, this.about).catch(() => null);
    this.by("own").classList.toggle("failed", pixels === null);
    if (pixels) this.take(pixels, null);
    this.say(pixels ? `${file.name} is cut into ${this.count} pieces.` : `${file.name} cannot be read as a picture.`);
  }

  // --- what the model is asked

  /** MP3's context: the first patches of a random order, those that all patches look at. */
  context(seed = this.seed) {
    return shuffled(this.count, seed).slice(0, this.count - this.told.hidden);
  }

  /** DropPos's visible patches in a random order, those that are told their place first, and how many these are. */
  visible(seed = this.seed) {
    const seen = shuffled(this.count, seed).slice(0, this.count - this.told.hidden);
    return [seen, seen.length - Math.min(seen.length, this.told.dropped)];
  }

  /** The places that a classifier is not told, of an order. */
  unknown(order) {
    return this.by("unknown")?.checked ? order.flatMap((patch, place) => (patch === place ? [] : [place])) : [];
  }

  /** What the model says of a picture in an order: {patches asked, shares of the places of each}, or of the classes. */
  answer(model, pixels, order, seed, watch = null) {
    const { kind, multi } = this.about;
    if (kind === "classes") {
      const logits = model.classes(pixels, order, this.unknown(order), watch);
      return { shares: multi ? logits.map((value) => 1 / (1 + Math.exp(-value))) : softmax(logits) };
    }
    let [asked, logits] = [Array.from({ length: this.count }, (_, n) => n), null];
    if (kind === "places") {
      logits = model.places(pixels, this.context(seed));
    } else {
      const [seen, known] = this.visible(seed);
      const places = seen.map((patch) => order.indexOf(patch));
      logits = model.dropped(pixels, seen, places, known);
      asked = seen.slice(known);
    }
    return { asked, shares: asked.map((_, n) => softmax(logits, n * this.count, this.count)) };
  }

  asked() {
    cancelAnimationFrame(this.waiting);
    this.waiting = requestAnimationFrame(() => this.ask());
  }

  ask() {
    const { kind } = this.about;
    this.found = this.answer(this.model, this.pixels, this.board.order, this.seed);
    if (kind !== "classes") {
      this.guesses = new Map();
      this.found.asked.forEach((patch, n) => {
        const shares = this.found.shares[n];
        const place = shares.indexOf(Math.max(...shares));
        this.guesses.set(patch, { shares, place, sure: shares[place] });
      });
    }
    this.board.mark(this.kinds());
    this.view.all();
  }

  /** How the pieces on the board are marked: those in the context, told or hidden. */
  kinds() {
    const kinds = new Array(this.count);
    if (this.about.kind === "places") for (const patch of this.context()) kinds[patch] = "context";
    if (this.about.kind === "dropped") {
      const [seen, known] = this.visible();
      kinds.fill("hidden");
      seen.forEach((patch, n) => (kinds[patch] = n < known ? "told" : undefined));
    }
    return kinds;
  }

  // --- sliders and buttons

  makeSliders() {
    const { kind, hidden, dropped } = this.about;
    const least = kind === "dropped" ? 2 : 1;
    const of = (share, count) => Math.floor((share ?? 0) * count + 1e-6);
    this.told.hidden = kind === "classes" ? 0 : Math.min(of(hidden, this.count), this.count - least);
    this.told.dropped = Math.max(1, of(dropped, this.count - this.told.hidden));
    this.slider("hidden", 0, kind === "classes" ? this.count : this.count - least);
    if (kind === "dropped") this.slider("dropped", 1, this.count - this.told.hidden);
    const names = { places: `η = ${hidden}`, dropped: `γ = ${hidden} and γₚₒₛ = ${dropped}`, classes: `γ = ${hidden}` };
    if (hidden !== undefined) this.by("trained").textContent = `It was trained with ${names[kind]}.`;
    this.tell();
  }

  slider(id, least, most) {
    const input = this.by(id);
    Object.assign(input, { min: least, max: most, step: 1, value: this.told[id] });
    input.addEventListener("input", () => {
      this.told[id] = Number(input.value);
      this.tell();
      if (this.about.kind === "classes") return this.shuffle(this.told.hidden);
      this.redraw();
      this.lock.again();
    });
  }

  /** The sliders in words. */
  tell() {
    const { kind } = this.about;
    const left = this.count - this.told.hidden;
    const share = (this.told.hidden / this.count).toFixed(2);
    const said = { places: `${share}: ${left} of ${this.count} seen`, dropped: `${share}: ${left} seen` };
    this.by("hidden-out").textContent = said[kind] ?? `${this.told.hidden} of ${this.count}`;
    if (kind !== "dropped") return;
    const input = this.by("dropped");
    input.max = left;
    this.told.dropped = Math.min(this.told.dropped, left);
    input.value = this.told.dropped;
    const known = left - this.told.dropped;
    this.by("dropped-out").textContent = `${(this.told.dropped / left).toFixed(2)}: ${known} told`;
  }

  /** Other patches are shown or told; those of DropPos that are told their place go home. */
  redraw() {
    if (this.about.kind === "dropped") this.shuffle(this.count);
    else this.asked();
  }

  /** The patches that DropPos is told the places of: they stay at home, so that it is told the truth. */
  fixed() {
    if (this.about.kind !== "dropped") return [];
    const [seen, known] = this.visible();
    return seen.slice(0, known);
  }

  /** Some of the pieces in a random order, the others at home. */
  shuffle(count) {
    const fixed = this.fixed();
    const moved = shuffled(this.count, ++this.moves).filter((patch) => !fixed.includes(patch));
    moved.length = Math.min(count, moved.length);
    const order = Array.from({ length: this.count }, (_, n) => n);
    moved.forEach((place, n) => (order[place] = moved[(n + 1) % moved.length]));
    this.board.place(order);
  }

  makeButtons() {
    const on = (id, act) => this.by(id)?.addEventListener("click", act);
    on("shuffle", () => this.setShuffled(this.count));
    on("reset", () => this.setShuffled(0));
    on("follow", () => this.follow());
    on("again", () => {
      this.seed++;
      this.redraw();
    });
    this.by("unknown")?.addEventListener("change", () => this.asked());
  }

  setShuffled(count) {
    if (this.about.kind === "classes") {
      this.told.hidden = count;
      this.by("hidden").value = count;
      this.tell();
    }
    if (count) this.shuffle(count);
    else this.board.place(Array.from({ length: this.count }, (_, n) => n));
  }

  /** The pieces where the model puts them, the surest first; what is left fills the gaps. */
  follow() {
    const order = new Array(this.count).fill(-1);
    const sorted = [...this.guesses].sort((a, b) => b[1].sure - a[1].sure);
    const left = [];
    const fixed = this.board.order.filter((patch) => !this.guesses.has(patch));
    for (const patch of fixed) order[this.board.order.indexOf(patch)] = patch;
    for (const [patch, { place }] of sorted) {
      if (order[place] < 0) order[place] = patch;
      else left.push(patch);
    }
    this.board.place(order.map((patch) => (patch < 0 ? left.shift() : patch)));
  }
}

const play = new Play();
