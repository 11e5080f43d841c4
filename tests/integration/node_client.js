// What a program in another language does with the API, from the .proto files alone.
// node node_client.js PROTO_FOLDER TARGET; prints one line of JSON.
'use strict';

const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [protoFolder, target] = process.argv.slice(2);
const LAYOUT = {
  layers: 2, kvHeads: 2, headDim: 8, dtype: 'float16', blockTokens: 4, kvForm: 'split', axisOrder: 'LKHTD', rope: '',
  quantisation: '', tensorParallel: 1, pipelineParallel: 1, engine: 'any', engineLayout: 1,
};
const BLOCKS = 10;

function packedTokens(count) {
  const packed = Buffer.alloc(4 * count);
  for (let index = 0; index < count; index += 1) packed.writeUInt32LE(100 + index, 4 * index);
  return packed;
}

function main() {
  const definition = loader.loadSync(['kvstore/v1/cache_service.proto'], { includeDirs: [protoFolder], longs: Number });
  const { CacheService } = grpc.loadPackageDefinition(definition).kvstore.v1;
  const client = new CacheService(target, grpc.credentials.createInsecure());
  const call = (method, request) => new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + 10000 }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
  const session = client.session();
  session.on('error', () => {});
  session.write({ clientVersion: 'node' });
  session.on('data', async (greeting) => {
    try {
      console.log(JSON.stringify(await use(client, call, greeting.sessionId)));
    } catch (error) {
      console.log(JSON.stringify({ error: String(error) }));
    }
    session.end();
    client.close();
  });
}

async function use(client, call, sessionId) {
  const namespace = { tenant: 'default', model: 'model', revision: 'revision', layout: LAYOUT };
  const opened = await call('openNamespace', { sessionId, namespace });
  const prompt = { nsId: opened.nsId, tokens: packedTokens(4 * BLOCKS) };
  const before = await call('match', { sessionId, prompt });
  const staged = await call('stage', { sessionId, prompt, stageId: 1 });
  const bytes = Buffer.alloc(BLOCKS * opened.blockBytes);
  for (let index = 0; index < bytes.length; index += 1) bytes[index] = index % 251;
  const rows = await write(client, { sessionId, stageId: 1, blocks: staged.blocks }, bytes);
  const committed = await call('commit', { sessionId, stageId: 1 });
  const after = await call('match', { sessionId, prompt });
  const leased = await call('lease', { sessionId, prompt, blocks: after.blocks, leaseId: 1 });
  const loaded = await load(client, { sessionId, leaseId: 1, blocks: leased.blocks });
  await call('release', { sessionId, leaseId: 1 });
  const refused = await call('match', { sessionId, prompt: { nsId: Buffer.alloc(3), tokens: prompt.tokens } })
    .then(() => 'answered', (error) => error.metadata.get('kvstore-error')[0]);
  return {
    before: before.blocks || 0, staged: staged.blocks, rows, committed: committed.blocks, after: after.blocks,
    leased: leased.blocks, loaded: loaded.blocks, equal: loaded.bytes.equals(bytes), refused,
  };
}

function write(client, start, bytes) {
  return new Promise((resolve, reject) => {
    const stream = client.write({ deadline: Date.now() + 10000 }, (error, answer) => (error ? reject(error) : resolve(answer.rows)));
    stream.write({ start });
    for (let at = 0; at < bytes.length; at += 1000) stream.write({ frame: bytes.subarray(at, at + 1000) });
    stream.end();
  });
}

function load(client, request) {
  return new Promise((resolve, reject) => {
    const frames = [];
    let blocks = 0;
    const stream = client.load(request, { deadline: Date.now() + 10000 });
    stream.on('data', (message) => {
      if (message.summary) blocks = message.summary.blocks;
      else frames.push(message.frame);
    });
    stream.on('error', reject);
    stream.on('end', () => resolve({ blocks, bytes: Buffer.concat(frames) }));
  });
}

main();
