// Says which digits images show, with the WebAssembly build: node classify.mjs digits.wasm IMAGE.pgm ...
//
// The structures of digits.h lie in the module's memory: a torch_hlo_tensor is data u32 @0, nbytes u64 @8, sizes u32 @16, dtype i32 @20,
// rank i32 @24, 32 bytes in all. Memory from __heap_base on is ours.
import fs from "node:fs";

const U8 = 6, F32 = 11;
const [file, ...paths] = process.argv.slice(2);
const { instance } = await WebAssembly.instantiate(fs.readFileSync(file));
const { memory, __heap_base, digits_plan, digits_run } = instance.exports;

let top = __heap_base.value;
function allocate(bytes) {
  const at = (top + 63) & ~63;
  top = at + bytes;
  const missing = top - memory.buffer.byteLength;
  if (missing > 0) memory.grow(Math.ceil(missing / 65536));
  return at;
}

function tensor(at, data, nbytes, sizes, dtype, rank) {
  const view = new DataView(memory.buffer);
  view.setUint32(at, data, true);
  view.setBigUint64(at + 8, BigInt(nbytes), true);
  view.setUint32(at + 16, sizes, true);
  view.setInt32(at + 20, dtype, true);
  view.setInt32(at + 24, rank, true);
}

const error = allocate(256);
function check(code) {
  if (code === 0) return;
  const text = new Uint8Array(memory.buffer, error + 4, 252);
  console.error(new TextDecoder().decode(text.subarray(0, text.indexOf(0))));
  process.exit(1);
}

function pixels(path) {
  const data = fs.readFileSync(path);
  const header = /^P5\s+8\s+8\s+255\s/.exec(data.toString("latin1", 0, 32));
  if (!header) throw new Error(`${path}: not a P5 image of 8 x 8 pixels`);
  return data.subarray(header[0].length, header[0].length + 64);
}

const batch = paths.length;
const input = allocate(32), output = allocate(32), need = allocate(8), inSizes = allocate(32), outSizes = allocate(16);
new BigInt64Array(memory.buffer, inSizes, 4).set([BigInt(batch), 1n, 8n, 8n]);
const images = allocate(batch * 64);
paths.forEach((path, i) => new Uint8Array(memory.buffer, images + 64 * i, 64).set(pixels(path)));
tensor(input, images, batch * 64, inSizes, U8, 4);
tensor(output, 0, 0, outSizes, 0, 0);
check(digits_plan(input, 1, output, 1, need, error));

const bytes = new DataView(memory.buffer).getBigUint64(need, true);
const workspace = allocate(Number(bytes)), scores = allocate(batch * 40);
tensor(output, scores, batch * 40, outSizes, F32, 2);
check(digits_run(input, 1, output, 1, workspace, bytes, 0, 0n, error));
for (let i = 0; i < batch; i++) {
  const row = [...new Float32Array(memory.buffer, scores + 40 * i, 10)];
  const best = row.indexOf(Math.max(...row));
  console.log(`${paths[i]}: ${best} (${(100 * row[best]).toFixed(1)}%)`);
}
