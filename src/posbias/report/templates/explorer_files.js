// Runs that are dropped on the explorer, and what it saves.

function save(name, values) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${[...values].join("\n")}\n`], { type: "text/csv" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

const isMeasured = (name) => name.split("/").includes("measured") && name.endsWith("/influence");
const TYPES = {
  F64: ["float64", 8, Float64Array],
  F32: ["float32", 4, Float32Array],
  F16: ["float16", 2],
  I64: ["int64", 8],
  I32: ["int32", 4],
  I16: ["int16", 2],
  I8: ["int8", 1],
  U64: ["uint64", 8],
  U32: ["uint32", 4],
  U16: ["uint16", 2],
  U8: ["uint8", 1],
  BOOL: ["bool", 1],
}; // as NumPy calls them, bytes of a number, and how those that profiles have are read
const DAMAGED = "is damaged or no run of posbias";

/** What a file says of itself that no run of posbias would: one sentence. */
class Refusal extends Error {}

function reject(file, reason) {
  throw new Refusal(`${file} ${reason}.`);
}

const shortly = (value) => String(JSON.stringify(value)).slice(0, 60);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** The record, of the format that `load_record` reads and with fields of its sorts, of a run that finished. */
function checkRecord(record, file) {
  if (!isObject(record)) reject(file, "is no run of posbias");
  const { format_version: version } = record;
  if (version !== GIVEN.rules.format_version)
    reject(file, `has record format ${shortly(version)}; this page reads format ${GIVEN.rules.format_version}`);
  for (const name of ["verb", "run_id"])
    if (typeof record[name] !== "string") reject(file, `${DAMAGED}: its ${name} is ${shortly(record[name])}`);
  for (const name of ["arguments", "resolved"])
    if (!isObject(record[name])) reject(file, `${DAMAGED}: its ${name} are ${shortly(record[name])}`);
  if (record.status !== "done")
    reject(file, `did not finish (${record.error ?? shortly(record.status)}); only finished runs can be drawn`);
}

/** The values, if they are a profile as the library defines it, of a length that this page draws. */
function checkProfile(values, name, file) {
  const { most_positions: most, sum_tolerance: tolerance } = GIVEN.rules;
  const isList = Array.isArray(values) || ArrayBuffer.isView(values);
  if (!isList || values.length < 2) reject(file, `has ${isList ? values.length : "no"} values of ${name}; 2 are needed`);
  if (values.length > most) reject(file, `has ${number(values.length)} positions of ${name}; at most ${number(most)} are drawn`);
  let total = 0;
  for (const [position, value] of values.entries()) {
    if (typeof value !== "number" || !Number.isFinite(value) || value < 0) {
      const found = typeof value === "number" ? value : shortly(value);
      reject(file, `has ${found} at position ${position} of ${name}; a profile needs finite numbers >= 0`);
    }
    total += value;
  }
  if (!(Math.abs(total - 1) <= tolerance))
    reject(file, `has values of ${name} that sum to ${Number(total.toPrecision(9))}; those of a profile sum to 1`);
}

/** The hash that posbias wrote beside the record: of its text and of every array with name, type and shape. */
async function checkSeal(record, tensors, seal, file) {
  if (!crypto.subtle) return; // a page that came over plain http has no hashes
  const encode = (words) => new TextEncoder().encode(words);
  const parts = [encode(record)];
  for (const name of Object.keys(tensors).sort()) {
    const { dtype, shape, bytes } = tensors[name];
    const sizes = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
    parts.push(encode(`${name} ${TYPES[dtype][0]} (${sizes})`), bytes);
  }
  const whole = new Uint8Array(await new Blob(parts).arrayBuffer());
  const hash = [...new Uint8Array(await crypto.subtle.digest("SHA-256", whole))];
  if (hash.map((byte) => byte.toString(16).padStart(2, "0")).join("") !== seal)
    reject(file, `${DAMAGED}: its content is not what posbias wrote`);
}

/** Record and float arrays of arrays.safetensors, whose header says where each lies and holds the record. */
async function readArrays(buffer, file) {
  if (buffer.byteLength < 8) reject(file, DAMAGED);
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  if (start > buffer.byteLength) reject(file, DAMAGED);
  const { __metadata__: held, ...tensors } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  if (!isObject(held) || typeof held.record !== "string") reject(file, "is no run of posbias");
  const arrays = {};
  for (const [name, tensor] of Object.entries(tensors)) {
    const { dtype, shape, data_offsets: ends } = tensor;
    const [, size, read] = TYPES[dtype] ?? [];
    const [low, high] = Array.isArray(ends) ? ends.map((end) => start + end) : [];
    const count = Array.isArray(shape) ? shape.reduce((product, sides) => product * sides, 1) : -1;
    if (!(size && low >= start && high <= buffer.byteLength && high - low === count * size))
      reject(file, `${DAMAGED}: ${name} has no place in it`);
    tensor.bytes = new Uint8Array(buffer, low, high - low);
    if (isMeasured(name) && !(read && shape.length === 1)) reject(file, `${DAMAGED}: ${name} is no list of numbers`);
    if (read) arrays[name] = new read(buffer.slice(low, high));
  }
  await checkSeal(held.record, tensors, held.sha256, file);
  return [JSON.parse(held.record), arrays];
}

/** Measured profiles of a run: from record.json or what --json printed, or from arrays.safetensors. */
async function measuredIn(buffer, file) {
  const isText = file.endsWith(".json");
  const [record, arrays] = isText
    ? [JSON.parse(new TextDecoder().decode(buffer)), {}]
    : await readArrays(buffer, file);
  checkRecord(record, file);
  const { resolved, run_id: run } = record;
  if (isText) {
    if (runs.some((known) => known.run === run)) return []; // its arrays are there already, or itself
    Object.assign(arrays, record.arrays, record.profiles);
  }
  const names = Object.keys(arrays).filter(isMeasured);
  const unread = names.find((name) => typeof arrays[name]?.[0] === "string");
  if (unread && isText && Array.isArray(arrays[unread][1]))
    reject(file, `has no numbers of ${unread}: take arrays.safetensors, which lies beside it`);
  if (!names.length) reject(file, "holds no measured profile");
  const title = resolved.title ?? resolved.model?.source ?? record.arguments.model ?? file;
  return names.map((name) => {
    checkProfile(arrays[name], name, file);
    const words = name.split("/").filter((word) => word !== "measured" && word !== "influence");
    return { name: [title, ...words].join(", "), values: Float64Array.from(arrays[name]), run };
  });
}

/** Draws the runs of the files, each run once: its arrays stand for the record beside them. */
async function take(files) {
  const told = [];
  const most = GIVEN.rules.most_bytes;
  for (const file of [...files].sort((one, other) => one.name.endsWith(".json") - other.name.endsWith(".json"))) {
    try {
      if (file.size > most) reject(file.name, `has ${number(file.size)} bytes; at most ${number(most)} are read`);
      const found = await measuredIn(await file.arrayBuffer(), file.name);
      if (!runs.length && found.length) state.n = found[0].values.length;
      for (const curve of found) {
        const known = runs.findIndex(({ run, name }) => run === curve.run && name === curve.name);
        runs.splice(known < 0 ? runs.length : known, 1, curve);
      }
    } catch (error) {
      const isFormat = error instanceof SyntaxError || error instanceof RangeError || error instanceof TypeError;
      told.push(isFormat ? `${file.name} is no run of posbias.` : error.message);
    }
  }
  list(told);
  set({});
}

function list(told = []) {
  const entries = runs.map((run, index) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.textContent = "remove";
    button.setAttribute("aria-label", `remove ${run.name}`);
    button.addEventListener("click", () => {
      runs.splice(index, 1);
      list();
      set({});
    });
    item.append(`${run.name} (${number(run.values.length)} positions)`, button);
    return item;
  });
  const notes = told.map((text) => Object.assign(document.createElement("li"), { textContent: text }));
  $("runs").replaceChildren(...entries, ...notes);
}
