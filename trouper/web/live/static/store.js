// Conversations and their pictures, in this browser (IndexedDB) and nowhere else.

const NAME = "trouper";
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

export class Store {
  #opened = open();
  #kept = new Map(); // Of a browser that keeps nothing: until the page is left.
  #pictures = new Map();

  /** Whether anything outlives the page. */
  async keeps() {
    return Boolean(await this.#opened);
  }

  /** The newest first. */
  async all() {
    const all = (await this.#do("conversations", "readonly", (place) => place.getAll())) ?? [...this.#kept.values()];
    return all.sort((one, other) => other.at - one.at);
  }

  async put(conversation) {
    if (await this.keeps()) await this.#do("conversations", "readwrite", (place) => place.put(conversation));
    else this.#kept.set(conversation.id, conversation);
  }

  /** A picture's id begins with its conversation's, so that both can be removed together. */
  async putPicture(id, blob) {
    if (await this.keeps()) await this.#do("pictures", "readwrite", (place) => place.put(blob, id));
    else this.#pictures.set(id, blob);
  }

  async picture(id) {
    return (await this.#do("pictures", "readonly", (place) => place.get(id))) ?? this.#pictures.get(id);
  }

  async remove(id) {
    this.#kept.delete(id);
    await this.#do("conversations", "readwrite", (place) => place.delete(id));
    await this.#do("pictures", "readwrite", (place) => place.delete(IDBKeyRange.bound(`${id}/`, `${id}0`)));
  }

  async clear() {
    this.#kept.clear();
    this.#pictures.clear();
    await this.#do("conversations", "readwrite", (place) => place.clear());
    await this.#do("pictures", "readwrite", (place) => place.clear());
  }

  async #do(name, mode, act) {
    const database = await this.#opened;
    return database ? done(act(database.transaction(name, mode).objectStore(name))) : undefined;
  }
}

/** Null where the browser keeps nothing, as in some private windows. */
async function open() {
  try {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("pictures");
    };
    const database = await done(request);
    // Else a later version of this page could not change it while this tab is open.
    database.onversionchange = () => database.close();
    return database;
  } catch {
    return null;
  }
}
