// Runs that are dropped on the explorer, and what it saves.

function save(name, values) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${[...values].join("\n")}\n`], { type: "text/csv" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

const FLOATS = { F64: Float64Array, F32: Float32Array };
const isMeasured = (name) => name.split("/").includes("measured") && name.endsWith("/influence");

/** Measured profiles of a run: from record.json or what --json printed, or from arrays.safetensors, whose header holds the record. */
function measuredIn(buffer, file) {
  const bytes = new Uint8Array(buffer);
  const text = (from, to) => new TextDecoder().decode(bytes.subarray(from, to));
  let [record, arrays] = [null, {}];
  if (file.endsWith(".json")) {
    record = JSON.parse(text(0, bytes.length));
    arrays = { ...record.arrays, ...record.profiles };
    const [unread] = Object.keys(arrays).filter((name) => isMeasured(name) && typeof arrays[name][0] === "string");
    if (unread) throw new Error(`${file} has no numbers of ${unread}: take arrays.safetensors, which lies beside it.`);
  } else {
    const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
    const header = JSON.parse(text(8, start));
    record = JSON.parse(header.__metadata__?.record ?? "{}");
    for (const [name, { dtype, data_offsets: ends }] of Object.entries(header)) {
      if (dtype in FLOATS) arrays[name] = new FLOATS[dtype](buffer.slice(start + ends[0], start + ends[1]));
    }
  }
  const title = record.resolved?.title ?? record.resolved?.model?.source ?? record.arguments?.model ?? file;
  return Object.keys(arrays)
    .filter(isMeasured)
    .map((name) => {
      const words = name.split("/").filter((word) => word !== "measured" && word !== "influence");
      return { name: [title, ...words].join(", "), values: Float64Array.from(arrays[name]) };
    });
}

async function take(files) {
  const told = [];
  for (const file of files) {
    try {
      const found = measuredIn(await file.arrayBuffer(), file.name);
      if (!found.length) told.push(`${file.name} holds no measured profile.`);
      if (!runs.length && found.length) state.n = found[0].values.length;
      runs.push(...found);
    } catch (error) {
      told.push(
        error instanceof SyntaxError || error instanceof RangeError
          ? `${file.name} is no run of posbias.`
          : error.message,
      );
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
