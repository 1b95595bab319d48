// A small controller over REST: node controller.js HOST PORT KEY_FILE CERTIFICATE
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { sizeDelimitedDecodeStream } from "@bufbuild/protobuf/wire";
import { readFileSync } from "node:fs";
import type { IncomingMessage } from "node:http";
import { Agent, request as send } from "node:https";
import { createInterface } from "node:readline";
import * as pb from "./protos/service_pb.js";

const config = {
  inbounds: [
    {
      tag: "in",
      listen: "127.0.0.1",
      port: 21443,
      protocol: "vless",
      settings: { clients: [], decryption: "none" },
    },
  ],
  outbounds: [{ tag: "direct", protocol: "freedom" }],
};

// An error of the node. `code` is a word that stays the same, `message` is for people.
class Refusal extends Error {
  constructor(readonly status: number, readonly code: string, text: string) {
    super(text);
  }
}

const [host, port, keyFile, certificate] = process.argv.slice(2) as [string, string, string, string];
const key = readFileSync(keyFile, "utf8").trim();
const agent = new Agent({ ca: readFileSync(certificate), keepAlive: true });

// Sends a request, and returns the reply when its headers are there. `fetch` cannot send a body with GET.
function open<D extends DescMessage>(verb: string, path: string, schema: D, message: MessageInitShape<D>) {
  return new Promise<IncomingMessage>((resolve, reject) => {
    const body = toBinary(schema, create(schema, message));
    const headers = {
      Authorization: `Bearer ${key}`,
      "Content-Type": "application/x-protobuf",
      "Content-Length": body.length,
    };
    const sent = send({ host, port, path, method: verb, headers, agent }, resolve);
    sent.on("error", reject);
    sent.end(body);
  });
}

// Calls an operation, and returns the reply's message.
async function call<D extends DescMessage, R extends DescMessage>(
  verb: string,
  path: string,
  schema: D,
  message: MessageInitShape<D>,
  reply: R,
): Promise<MessageShape<R>> {
  const response = await open(verb, path, schema, message);
  const parts: Buffer[] = [];
  for await (const part of response) parts.push(part as Buffer);
  const content = Buffer.concat(parts);
  if (response.statusCode !== 200) {
    const { code, error } = JSON.parse(content.toString()) as { code: string; error: string };
    throw new Refusal(response.statusCode ?? 0, code, error);
  }
  return fromBinary(reply, content);
}

// A user in these inbounds. Without any it removes the user.
function user(email: string, id: string, ...inbounds: string[]) {
  return { email, proxies: { vless: { id } }, inbounds };
}

const sync = (changed: ReturnType<typeof user>) => call("PUT", "/user/sync", pb.UserSchema, changed, pb.EmptySchema);

// Safe to repeat: an equal Start disconnects no user.
const alice = user("alice", "5783a3e7-e373-51cd-8642-c83782b807c5", "in");
const backend = { type: pb.BackendType.XRAY, config: JSON.stringify(config), users: [alice] };
const info = await call("POST", "/start", pb.BackendSchema, backend, pb.BaseInfoResponseSchema);
console.log("started", info.coreType, info.state);

const bob = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6";
await sync(user("bob", bob, "in"));
try {
  await sync(user("a>>>b", bob, "in"));
} catch (error) {
  if (!(error instanceof Refusal)) throw error;
  console.log("refused", error.code);
}
await sync(user("bob", bob));
const { users } = await call("GET", "/users", pb.ListUsersRequestSchema, {}, pb.ListUsersResponseSchema);
for (const row of users) console.log("user", row.name);

// Each byte is in exactly one reply with reset: add them up. Values are of type bigint.
const wanted = { type: pb.StatType.UsersStat, reset: true };
const { stats } = await call("GET", "/stats", pb.StatRequestSchema, wanted, pb.StatResponseSchema);
for (const row of stats) console.log("bytes", row.name, row.type, row.value.toString());

// Messages, each after its length. Keep `sequence` and `epoch` of the last one, and go on after it next time.
const events = await open("GET", "/events", pb.EventsRequestSchema, { kinds: ["backend"] });
let last = "";
for await (const event of sizeDelimitedDecodeStream(pb.EventSchema, events)) last = event.kind || last;
console.log("event", last);

// Server-Sent Events, until somebody closes the stream.
const logs = await open("GET", "/logs", pb.EmptySchema, {});
for await (const line of createInterface({ input: logs })) {
  if (!line.startsWith("data: ")) continue;
  console.log("log", line.split(" ")[1]);
  break;
}
logs.destroy();

await call("PUT", "/stop", pb.EmptySchema, {}, pb.EmptySchema);
const { state } = await call("GET", "/info", pb.EmptySchema, {}, pb.BaseInfoResponseSchema);
console.log("stopped", state);
agent.destroy();
