// The lock: the same model with its channels permuted, and how much of it is left on the built-in pictures.

"use strict";

const SLICE = 30; // milliseconds of measuring at a time, so that the page answers
const NAMES = { open: "Not locked", locked: "Locked, without the key", keyed: "Locked, with the key" };
const TONES = { open: "accent", locked: "bad", keyed: "good" };

class Lock {
  constructor(play) {
    Object.assign(this, { play, models: { open: play.model }, locks: 0, sums: {} });
    play.by("lock").addEventListener("click", () => this.set(!this.models.locked));
    play.by("key").addEventListener("click", () => this.use(this.now === "keyed" ? "locked" : "keyed"));
  }

  set(on) {
    const { by } = this.play;
    const [locked, keyed] = on ? this.models.open.locked(++this.locks) : [];
    this.models = on ? { open: this.models.open, locked, keyed } : { open: this.models.open };
    for (const name of ["locked", "keyed"]) delete this.sums[name];
    by("lock").textContent = on ? "Unlock" : "Lock with a random key";
    by("lock").setAttribute("aria-pressed", on);
    by("key").hidden = !on;
    this.use(on ? "locked" : "open");
    this.measure();
  }

  /** Which of the models answers: open, locked without the key, or with it. */
  use(name) {
    const { by } = this.play;
    this.now = name;
    by("key").textContent = name === "keyed" ? "Take the key away" : "Use the key";
    by("key").setAttribute("aria-pressed", name === "keyed");
    document.body.dataset.lock = name;
    this.play.model = this.models[name];
    this.play.asked();
  }

  /** Measures anew: something else is told. */
  again() {
    this.sums = {};
    this.measure();
  }

  /** Measures each model, a slice at a time; a new call goes on where an old one was. */
  async measure() {
    const run = (this.run = {});
    const { pictures } = this.play;
    let since = performance.now();
    for (const [name, model] of Object.entries(this.models)) {
      const sum = (this.sums[name] ??= { seen: 0, right: 0, all: 0 });
      while (sum.seen < pictures.length) {
        this.add(sum, model, sum.seen++);
        if (performance.now() - since < SLICE) continue;
        this.show();
        await new Promise((done) => setTimeout(done));
        if (this.run !== run) return;
        since = performance.now();
      }
    }
    this.show();
  }

  /** One picture more: its class, or the places of its patches, pieces at home. */
  add(sum, model, n) {
    const { about, count, pictures } = this.play;
    const home = Array.from({ length: count }, (_, place) => place);
    const { asked, shares } = this.play.answer(model, pictures[n], home, n + 1);
    const best = (values) => values.indexOf(Math.max(...values));
    if (about.kind === "classes") {
      this.before ??= [];
      if (model === this.models.open) this.before[n] = best(shares);
      sum.right += best(shares) === (about.labels ?? this.before)[n];
      sum.all += 1;
    } else {
      asked.forEach((patch, k) => (sum.right += best(shares[k]) === patch));
      sum.all += asked.length;
    }
  }

  show() {
    const { about, by, count, pictures } = this.play;
    const rows = Object.keys(this.models).filter((name) => this.sums[name]?.all);
    const bars = rows.map((name) => bar(NAMES[name], this.sums[name].right / this.sums[name].all, TONES[name]));
    by("measured").replaceChildren(...bars);
    const classes = about.kind === "classes";
    const right = about.labels ? "pictures classified right" : "pictures that keep their class";
    const what = classes ? right : "patches put right";
    const chance = classes ? 1 / about.classes.length : 1 / count;
    const seen = Math.min(...rows.map((name) => this.sums[name].seen));
    const on = seen < pictures.length ? `${seen} of ${pictures.length} pictures so far` : `${seen} pictures`;
    by("measured-on").textContent = `Share of ${what}, on ${on}; chance is ${percent(chance)}.`;
  }
}
