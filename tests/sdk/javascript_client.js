// A client in JavaScript, which shares no line with gRPC's core: `node javascript_client.js
// ADDRESS PROTOS SECONDS SEED`. It sends requests of every kind, sixteen at once, reads them in
// every manner, and prints how they ended and what was wrong, as JSON.
"use strict";
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protos, seconds, seed] = process.argv.slice(2);
const HANGS_AFTER_MS = 60000;
const N_WORKERS = 16;
const N_MOST = 48;
const PROMPTS = ["The quick brown fox", "def main():\n", "Once upon a time", "To be or not"];

const definition = loader.loadSync("drafthouse/v1/generation.proto", {
  includeDirs: [protos], keepCase: true, longs: Number, enums: String, oneofs: true,
});
const api = grpc.loadPackageDefinition(definition).drafthouse.v1;
const connect = (options = {}) =>
  new api.GenerationService(address, grpc.credentials.createInsecure(), options);
const shared = [
  connect(),
  connect({ "grpc.keepalive_time_ms": 10000, "grpc.keepalive_permit_without_calls": 1 }),
  connect({ "grpc.default_compression_algorithm": 2 }),
];

let state = (Number(seed) * 2654435761) >>> 0 || 1;
function random() {
  state ^= state << 13; state >>>= 0;
  state ^= state >>> 17;
  state ^= state << 5; state >>>= 0;
  return state / 4294967296;
}
const below = (n) => Math.floor(random() * n);
const oneOf = (list) => list[below(list.length)];

const counts = {};
const faults = [];

function request(text, n) {
  return {
    prompt: { text }, max_output_tokens: n, sampling: { temperature: 0 },
    stop: { ignore_end_token: true },
  };
}

// Resolves when the stream has ended and all of it was read; never rejects.
function generate(client, message, how) {
  return new Promise((resolve) => {
    const metadata = new grpc.Metadata();
    if (how.header) metadata.set("x-long", "a".repeat(how.header));
    const options = how.deadlineMs ? { deadline: Date.now() + how.deadlineMs } : {};
    const call = client.Generate(message, metadata, options);
    const ids = [];
    let nRead = 0, isRead = false, status = null;
    const hangs = setTimeout(() => {
      faults.push(`${how.kind}: no end after a minute`);
      resolve({ ids, status: { code: -1, details: "", metadata } });
    }, HANGS_AFTER_MS);
    const end = () => {
      if (!status || !(isRead || status.code)) return;
      clearTimeout(hangs);
      resolve({ ids, status });
    };
    call.on("data", (event) => {
      nRead += 1;
      if (event.chunk) ids.push(...event.chunk.token_ids);
      if (nRead === how.cancelAfter) call.cancel();
      if (nRead === how.closeAfter) client.close();
      if (how.pauseMs && nRead % 5 === 0) {
        call.pause();
        setTimeout(() => call.resume(), how.pauseMs);
      }
    });
    call.on("error", () => {}); // the status says it
    call.on("end", () => { isRead = true; end(); });
    call.on("status", (found) => { status = found; end(); });
    if (how.cancelMs !== undefined) setTimeout(() => call.cancel(), how.cancelMs);
  });
}

// The reason in google.rpc.ErrorInfo: the one word in capitals there.
function reasonOf(status) {
  const details = status.metadata.get("grpc-status-details-bin")[0];
  const found = details && /[A-Z][A-Z_]{5,}/.exec(details.toString("latin1"));
  return found ? found[0] : "";
}

const WAYS = {
  whole: () => ({}),
  cancelled: () => ({ cancelAfter: 1 + below(8) }),
  "cancelled in time": () => ({ cancelMs: random() * 60 }),
  deadline: () => ({ deadlineMs: 1 + random() * 80 }),
  paused: () => ({ pauseMs: random() * 100 }),
  closed: () => ({ client: connect(), closeAfter: 1 + below(4) }),
  fresh: () => ({ client: connect(), isFresh: true }),
  wrong: (text) => ({ message: oneOf([{}, request(text, 0), { prompt: { text: "" } }]) }),
  huge: () => ({ message: request("a b ".repeat(below(2000000)), 1) }),
  "long header": () => ({ header: below(40000) }),
};

async function tokenize(client, text) {
  const deadline = Date.now() + HANGS_AFTER_MS;
  return new Promise((resolve) => client.Tokenize({ text }, { deadline }, (error) => resolve(error)));
}

async function once(expected) {
  const kind = oneOf(["whole", "whole", "tokenized", ...Object.keys(WAYS)]);
  const text = oneOf(PROMPTS);
  const n = 1 + below(N_MOST);
  if (kind === "tokenized") {
    const error = await tokenize(oneOf(shared), text);
    const name = error ? grpc.status[error.code] : "OK";
    counts[`tokenized ${name}`] = (counts[`tokenized ${name}`] || 0) + 1;
    return error ? error.code : 0;
  }
  const how = { kind, ...WAYS[kind](text) };
  const client = how.client || oneOf(shared);
  const { ids, status } = await generate(client, how.message || request(text, n), how);
  if (how.isFresh) client.close();
  const name = `${kind} ${grpc.status[status.code]} ${reasonOf(status)}`.trim();
  counts[name] = (counts[name] || 0) + 1;
  if (!how.message) {
    const right = expected[text].slice(0, ids.length);
    if (JSON.stringify(right) !== JSON.stringify(ids)) faults.push(`${kind}: wrong tokens ${ids}`);
    if (!status.code && ids.length !== n) faults.push(`${kind}: ${ids.length} of ${n} tokens`);
  }
  return status.code;
}

async function work(expected, until) {
  while (Date.now() < until) {
    const code = await once(expected);
    // A server that is away answers at once.
    if (code === grpc.status.UNAVAILABLE) await new Promise((go) => setTimeout(go, 20));
  }
}

async function main() {
  const expected = {};
  for (const text of PROMPTS) {
    const { ids, status } = await generate(shared[0], request(text, N_MOST), { kind: "first" });
    if (status.code) throw new Error(status.details);
    expected[text] = ids;
  }
  console.log("ready");
  const until = Date.now() + Number(seconds) * 1000;
  await Promise.all(Array.from({ length: N_WORKERS }, () => work(expected, until)));
  console.log(JSON.stringify({ counts, faults }));
  process.exit(0);
}

main();
