// How long ago the server was last heard.

/** Without a snapshot for so long, what was shown is of the past; there is one every two seconds, whatever happens. */
const OLD_MS = 5000;

export class Age {
  old = false;
  heardAt = 0;
  #timer = 0;
  #turned;

  /** turned(): it is old now, or is no longer. */
  constructor(turned) {
    this.#turned = turned;
  }

  hear() {
    this.heardAt = Date.now();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#turn(true), OLD_MS);
    if (this.old) this.#turn(false);
  }

  /** Nobody asks any more. */
  stop() {
    clearTimeout(this.#timer);
  }

  #turn(old) {
    this.old = old;
    this.#turned();
  }
}
