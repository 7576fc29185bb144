// Why the server refused a request.

/** The message of an error's body. One that is not the server's, as that of a proxy before it, goes by its status. */
export async function problemOf(response) {
  try {
    return String((await response.json()).error.message);
  } catch {
    return `The server, or what is before it, answered ${response.status}.`;
  }
}

/** A refusal that asking again does not change. */
export class Refused extends Error {}
