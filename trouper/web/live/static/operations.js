// What is done with models: POST /v1/models/load and its like.

import { WrongKey, headers } from "./key.js";
import { problemOf } from "./problem.js";
import { events } from "./sse.js";

/** Waits until it is done, and returns why not; "" if it was. It may take minutes: events keep the connection open.
 * tell(progress): how far it is. */
export async function operate(verb, body, tell = () => {}) {
  const response = await fetch(`v1/models/${verb}`, {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body),
  });
  if (response.status === 401) throw new WrongKey();
  if (!response.ok) return problemOf(response);
  if (!body.stream) return "";
  for await (const { event, data } of events(response.body)) {
    if (event === "error") return JSON.parse(data).error.message;
    if (event === "model") return "";
    if (event === "progress") tell(JSON.parse(data));
  }
  throw new Error("the stream has ended before the operation");
}
