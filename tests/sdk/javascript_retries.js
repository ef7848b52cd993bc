// A client in JavaScript with a service config: `node javascript_retries.js TARGET PROTOS CONFIG
// N_CALLERS N_TOKENS`. Its callers generate until the standard input ends; then it prints how many
// calls were whole, and what was wrong with the others, as JSON.
"use strict";
const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [target, protos, config, nCallers, nTokens] = process.argv.slice(2);
const definition = loader.loadSync("drafthouse/v1/generation.proto", {
  includeDirs: [protos], keepCase: true, longs: Number, enums: String, oneofs: true,
});
const api = grpc.loadPackageDefinition(definition).drafthouse.v1;
const client = new api.GenerationService(target, grpc.credentials.createInsecure(), {
  "grpc.service_config": fs.readFileSync(config, "utf8"),
});
const message = {
  prompt: { text: "x" }, max_output_tokens: Number(nTokens), stop: { ignore_end_token: true },
};

let isOver = false, nCalls = 0;
const faults = [];
process.stdin.on("end", () => { isOver = true; });
process.stdin.resume();

// Resolves when the call has ended, with the number of its tokens or what was wrong.
function generate() {
  return new Promise((resolve) => {
    const call = client.Generate(message);
    let n = 0;
    call.on("data", (event) => { if (event.chunk) n += event.chunk.token_ids.length; });
    call.on("error", (error) => resolve(`${grpc.status[error.code]}: ${error.details}`));
    call.on("end", () => resolve(n));
  });
}

async function work() {
  while (!isOver) {
    const end = await generate();
    if (end === Number(nTokens)) nCalls += 1;
    else faults.push(end);
  }
}

Promise.all(Array.from({ length: Number(nCallers) }, work)).then(() => {
  console.log(JSON.stringify({ n_calls: nCalls, faults }));
  process.exit(0);
});
