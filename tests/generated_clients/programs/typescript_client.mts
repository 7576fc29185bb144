/* node typescript_client.mjs URL: asks by openapi-fetch with the types of openapi-typescript. */
import assert from "node:assert/strict";
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.d.ts";

const client = createClient<paths, "application/json">({ baseUrl: process.argv[2] });
const messages = [{ role: "user" as const, content: "hello" }];
const max_tokens = 3;

const models = await client.GET("/v1/models");
assert(models.data && "data" in models.data && models.data.data[0]?.id === "fake");

const chat = await client.POST("/v1/chat/completions", { body: { messages, max_tokens } });
assert(chat.data?.choices[0]?.message.content);

const stream = await client.POST("/v1/chat/completions", {
  body: { messages, max_tokens, stream: true },
  parseAs: "text",
});
assert(stream.data);
let text = "";
for (const line of stream.data.split("\n").filter((one) => one.startsWith("data: {"))) {
  const chunk: components["schemas"]["ChatCompletionChunk"] = JSON.parse(line.slice(6));
  text += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(text, chat.data.choices[0].message.content);

const response = await client.POST("/v1/responses", {
  body: { input: "hello", max_output_tokens: 16 },
});
const item = response.data?.output[0];
assert(item?.type === "message" && item.content[0]?.type === "output_text");
assert(item.content[0].text);

const message = await client.POST("/v1/messages", { body: { messages, max_tokens } });
const block = message.data?.content[0];
assert(block?.type === "text" && block.text);

const vectors = await client.POST("/v1/embeddings", { body: { input: ["a", "b"] } });
assert.equal(vectors.data?.data.length, 2);

const refused = await client.POST("/v1/embeddings", { body: { input: [] } });
assert.equal(refused.response.status, 400);
assert(refused.error && "error" in refused.error);
