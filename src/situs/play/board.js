// The pieces of a picture on a grid: moved by mouse, touch or keys.

"use strict";

class Board {
  /** onChange: called when pieces have moved; onChoose: when another piece is looked at; say: tells a screen reader. */
  constructor(element, about, { onChange, onChoose, say }) {
    Object.assign(this, { element, about, onChange, onChoose, say });
    const [rows, columns] = about.grid;
    this.count = rows * columns;
    this.order = Array.from({ length: this.count }, (_, n) => n); // which patch stands at each place
    this.at = 0; // the place of the chosen piece
    this.held = null; // the order before a piece was picked up by keys
    element.style.setProperty("--columns", columns);
    element.style.setProperty("--shape", `${about.size[1]} / ${about.size[0]}`);
    this.cells = this.order.map((_, place) => this.cell(place));
    element.append(...this.cells);
  }

  cell(place) {
    const cell = document.createElement("button");
    const canvas = document.createElement("canvas");
    [canvas.height, canvas.width] = this.about.patch;
    cell.type = "button";
    cell.className = "piece";
    cell.append(canvas);
    cell.addEventListener("focus", () => this.choose(place));
    cell.addEventListener("keydown", (event) => this.key(event, place));
    cell.addEventListener("pointerdown", (event) => this.drag(event, place));
    return cell;
  }

  /** The words for a place: row 2, column 3. */
  where(place) {
    const columns = this.about.grid[1];
    return `row ${Math.floor(place / columns) + 1}, column ${(place % columns) + 1}`;
  }

  /** Another picture, as a canvas of the model's size; the order stays. */
  show(picture) {
    this.picture = picture;
    this.draw();
  }

  place(order) {
    const chosen = this.order[this.at];
    this.order = [...order];
    this.at = this.order.indexOf(chosen);
    this.draw();
    this.onChange();
  }

  swap(one, other) {
    const order = [...this.order];
    [order[one], order[other]] = [order[other], order[one]];
    this.place(order);
  }

  choose(place) {
    if (place === this.at) return;
    this.at = place;
    this.mark();
    this.onChoose();
  }

  draw() {
    const [high, wide] = this.about.patch;
    const columns = this.about.grid[1];
    this.cells.forEach((cell, place) => {
      const patch = this.order[place];
      const pen = cell.firstChild.getContext("2d");
      const [left, top] = [(patch % columns) * wide, Math.floor(patch / columns) * high];
      pen.clearRect(0, 0, wide, high);
      pen.drawImage(this.picture, left, top, wide, high, 0, 0, wide, high);
      const moved = patch === place ? "at home" : `piece from ${this.where(patch)}`;
      cell.setAttribute("aria-label", `${this.where(place)}: ${moved}`);
      cell.classList.toggle("moved", patch !== place);
    });
    this.mark();
  }

  /** Which piece is chosen, and which bear a mark of their own: kinds[patch] is a class or nothing. */
  mark(kinds = this.kinds ?? []) {
    this.kinds = kinds;
    this.cells.forEach((cell, place) => {
      const kind = kinds[this.order[place]];
      cell.dataset.kind = kind ?? "";
      cell.tabIndex = place === this.at ? 0 : -1;
      cell.classList.toggle("chosen", place === this.at);
    });
  }

  key(event, place) {
    const columns = this.about.grid[1];
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const step = steps[event.key];
    if (step !== undefined) {
      event.preventDefault();
      const row = Math.floor(place / columns);
      const to = place + step;
      if (to < 0 || to >= this.count || (Math.abs(step) === 1 && Math.floor(to / columns) !== row)) return;
      if (this.held) this.swap(place, to);
      this.cells[to].focus();
      if (this.held) this.say(`Moved to ${this.where(to)}.`);
    } else if (event.key === " " || event.key === "Enter") {
      event.preventDefault();
      this.hold(this.held ? null : [...this.order]);
      this.say(this.held ? "Picked up; arrows move it." : `Put down at ${this.where(place)}.`);
    } else if (event.key === "Escape" && this.held) {
      const before = this.held;
      this.hold(null);
      this.place(before);
      this.cells[this.at].focus();
      this.say("Let go; the pieces are as they were.");
    }
  }

  hold(order) {
    this.held = order;
    this.element.classList.toggle("holding", order !== null);
  }

  drag(event, place) {
    if (event.button > 0) return;
    this.hold(null);
    const cell = this.cells[place];
    const box = cell.getBoundingClientRect();
    const [x, y] = [event.clientX, event.clientY];
    const ended = new AbortController();
    let ghost = null;
    let target = null;
    cell.setPointerCapture(event.pointerId);
    this.choose(place);
    const move = (now) => {
      if (!ghost && Math.hypot(now.clientX - x, now.clientY - y) < 5) return;
      ghost ??= this.lift(cell, box);
      ghost.style.transform = `translate(${now.clientX - x}px, ${now.clientY - y}px) scale(1.15)`;
      target?.classList.remove("target");
      const below = document.elementsFromPoint(now.clientX, now.clientY).find((each) => each.matches(".piece"));
      target = below ?? null;
      target?.classList.add("target");
    };
    const end = (now) => {
      ended.abort();
      ghost?.remove();
      cell.classList.remove("lifted");
      target?.classList.remove("target");
      const to = this.cells.indexOf(target);
      if (now.type === "pointerup" && ghost && to >= 0 && to !== place) {
        this.swap(place, to);
        this.cells[to].focus({ preventScroll: true });
      }
    };
    cell.addEventListener("pointermove", move, { signal: ended.signal });
    cell.addEventListener("pointerup", end, { signal: ended.signal });
    cell.addEventListener("pointercancel", end, { signal: ended.signal });
  }

  lift(cell, box) {
    const ghost = document.createElement("canvas");
    [ghost.height, ghost.width] = this.about.patch;
    ghost.getContext("2d").drawImage(cell.firstChild, 0, 0);
    ghost.className = "ghost";
    Object.assign(ghost.style, {
      left: `${box.left}px`,
      top: `${box.top}px`,
      width: `${box.width}px`,
      height: `${box.height}px`,
    });
    cell.classList.add("lifted");
    document.body.append(ghost);
    return ghost;
  }
}
