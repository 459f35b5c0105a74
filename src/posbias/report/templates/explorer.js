// What is set on the explorer, in its controls and in the URL; what is computed of it; how it begins.

const $ = (id) => document.getElementById(id);
const GIVEN = JSON.parse($("given").textContent); // presets by name, and measured profiles [{name, values}]
const POINTS = 64; // of a drawn curve
const LETTERS = 36 * 36; // values of a point in the URL, two letters each
const NATS = 7; // a drawn curve lies between exp(-7) and exp(7) times an even share
const AT_ONCE = 2e6; // steps, positions times layers times heads: some milliseconds, without the worker
const LIVE = 2.4e7; // such steps in less than 50 ms; where there are more, a rough view comes first
const FEW = 10; // heads of which a rough view has as many
const PATIENCE = 300; // milliseconds after which an old question is given up for a new one

// name: [label, least, most, step, how its slider moves]
const NUMBERS = {
  n: ["Context length N (positions)", 2, 1e6, 1, "log"],
  depth: ["Layers", 1, 128, 1],
  mixing: ["Mixing: attention's share of each layer's update", 0, 1, 0.005],
  width: ["Window (positions, a query's own included)", 1, 1e6, 1, "log"],
  full: ["Every k-th layer without the window (0: none)", 0, 12, 1],
  prefix: ["Positions that see each other", 1, 1e6, 1, "log"],
  heads: ["Heads", 1, 128, 1],
  factor: ["The published slopes times", 1 / 64, 64, "any", "log"],
  slope: ["Nats lost per position", 1e-6, 10, "any", "log"],
  alpha: ["Exponent α of the first layer", 0.05, 100, "any", "log"],
  sink: ["Logit of an attention sink (empty: none)", -10, 20, 0.5],
  last: ["The last token's share (empty: as drawn, and what the residual stream adds)", 0, 1, 0.001],
};
const EMPTY = new Set(["sink", "last"]);
const CHOICES = {
  mask: [
    "Mask",
    { causal: "causal", window: "sliding window", prefix: "prefix, then causal", full: "none: all see all" },
  ],
  encoding: [
    "Positional encoding",
    {
      none: "none (so is RoPE without content)",
      alibi: "ALiBi: a slope per head",
      decay: "decay: one slope for all heads",
      gamma: "gamma keys: bias (α − 1) ln j",
      drawn: "the key bias of a drawn target",
    },
  ],
  growth: ["α in the layers above", { grows: "α / (1 − m): one shape at every length", same: "the same" }],
};
const ORDER = [
  "n",
  "depth",
  "mixing",
  "mask",
  "width",
  "full",
  "prefix",
  "encoding",
  "heads",
  "factor",
  "slope",
  "alpha",
  "growth",
  "sink",
  "last",
];
const PLAIN = {
  preset: "",
  n: 2048,
  depth: 24,
  mixing: 0.1,
  mask: "causal",
  width: 512,
  full: 0,
  prefix: 256,
  encoding: "none",
  heads: 8,
  factor: 1,
  slope: 0.01,
  alpha: 1,
  growth: "grows",
  sink: null,
  last: null,
  axis: "position",
  points: null,
  drawnOn: "position",
};
const SHAPES = {
  even: () => 0,
  "both ends": (x) => Math.log(0.15 + (2 * x - 1) ** 2),
  "the middle": (x) => Math.log(0.15 + 4 * x * (1 - x)),
  "the end": (x) => 3 * x,
};

let state = { ...PLAIN };
let shown = null; // the latest answer, with what was asked
let drawing = false;
const runs = GIVEN.measured.map((run) => ({ ...run, values: Float64Array.from(run.values) }));

/** What the page begins with: where there are runs at the length of the first, or no distance to it could be told. */
const beginning = () => ({ ...PLAIN, n: runs[0]?.values.length ?? PLAIN.n });

// ---- from settings to a question ----

const isKeys = () => state.encoding === "gamma" || state.encoding === "drawn";
const presetMixing = () => GIVEN.presets[state.preset]?.mixing;
const meanMixing = () => presetMixing().reduce((sum, m) => sum + m, 0) / presetMixing().length;
const curve = () => state.points ?? Array(POINTS).fill(0);

function mixingOf() {
  return state.mixing === "measured" ? presetMixing() : Array(state.depth).fill(state.mixing);
}

function question() {
  const mixing = mixingOf();
  const spec = { n: state.n, mixing, sink: isKeys() ? null : state.sink };
  const target = state.encoding === "drawn" ? { values: curve(), axis: state.drawnOn, last: state.last } : null;
  if (state.encoding === "gamma") {
    spec.alphas = state.growth === "same" ? mixing.map(() => state.alpha) : telescopingAlphas(state.alpha, mixing);
  } else if (!target) {
    const alibi = () => alibiSlopes(state.heads).map((slope) => slope * state.factor);
    spec.slopes = state.encoding === "alibi" ? alibi() : [state.encoding === "decay" ? state.slope : 0];
    if (state.mask === "window") Object.assign(spec, { reach: state.width, full: state.full });
    if (state.mask === "prefix" || state.mask === "full") spec.prefix = state.mask === "full" ? state.n : state.prefix;
  }
  const shownRuns = visibleRuns();
  return { spec, target, measured: shownRuns.map((run) => run.values), runs: shownRuns, settings: state };
}

function visibleRuns() {
  const own = GIVEN.presets[state.preset]?.measured;
  return [...(own ? [{ ...own, values: Float64Array.from(own.values) }] : []), ...runs];
}

// ---- what is quick is computed at once, the rest by a worker: one question at a time, roughly at first where it takes
// long, then the latest, or the same exactly; one that takes long is given up for a newer one ----

const code = $("code")
  .textContent.split("// ---- the page ----")[0]
  .replace(/^export /gm, "");
const place = URL.createObjectURL(
  new Blob([`${code}\n${attempt}\nonmessage = ({ data }) => postMessage(attempt(data));`]),
);
let worker = null;
let asked = null;
let since = 0;
let next = null;

function hire() {
  worker?.terminate();
  worker = new Worker(place);
  worker.onmessage = ({ data }) => {
    const done = asked;
    asked = null;
    if (next) send(next);
    show(data, done);
    if (!asked && done.spec.rough && !data.error) send({ ...done, spec: { ...done.spec, rough: false }, refines: true });
  };
  worker.onerror = () => refuse("This browser does not let a page compute in the background.");
}

function send(wanted) {
  [asked, since, next] = [wanted, performance.now(), null];
  const { spec, target, measured } = wanted;
  worker.postMessage({ spec, target, measured });
  $("picture").className = "busy";
}

function giveUp() {
  if (asked) hire();
  [asked, next] = [null, null];
}

function ask() {
  let wanted;
  try {
    wanted = question();
  } catch (error) {
    giveUp();
    refuse(error.message);
    return;
  }
  const { spec, target } = wanted;
  const heads = new Set(spec.slopes).size;
  const steps = spec.n * spec.mixing.length * (target ? 30 : heads || 1);
  const sums = spec.prefix ? 3 : spec.reach < spec.n ? 2 : 1; // per step: before, in the next block of a window, after
  spec.rough = heads > FEW && steps * sums > LIVE;
  if (steps < AT_ONCE || asked?.refines || performance.now() - since > PATIENCE) giveUp();
  if (steps < AT_ONCE) show(attempt(wanted), wanted);
  else if (asked) next = wanted;
  else send(wanted);
}

function attempt(wanted) {
  try {
    return answer(wanted);
  } catch (error) {
    return { error: error.message };
  }
}

function refuse(text) {
  $("verdict").textContent = text;
  $("picture").className = "wrong"; // what stands below is of the last settings that could be
}

function show(found, wanted) {
  if (found.error) {
    refuse(found.error);
    return;
  }
  shown = { ...found, ...wanted };
  const sunk = found.sunk > 0 ? ` The sink takes ${percent(found.sunk)}; the rest is shown as a whole.` : "";
  $("verdict").textContent = found.verdict + sunk;
  $("picture").className = "";
  $("took").textContent = `Computed in ${found.took < 10 ? found.took.toFixed(1) : found.took.toFixed(0)} ms.`;
  $("designed").hidden = !found.bias;
  if (found.bias) {
    const exactly = found.missed === 0 ? "to the last digit" : `to ${found.missed.toExponential(0)} everywhere`;
    $("range").textContent = `Key bias: ${found.range.toFixed(1)} nats from smallest to largest; target met ${exactly}`;
  }
  $("command").textContent = commandOf(wanted);
  draw();
}

// ---- settings ----

function relevant(name) {
  const keys = isKeys();
  if (name === "mask") return !keys;
  if (name === "width" || name === "full") return !keys && state.mask === "window";
  if (name === "prefix") return !keys && state.mask === "prefix";
  if (name === "heads" || name === "factor") return state.encoding === "alibi";
  if (name === "slope") return state.encoding === "decay";
  if (name === "alpha" || name === "growth") return state.encoding === "gamma";
  if (name === "sink") return !keys;
  return name !== "last" || state.encoding === "drawn";
}

function set(changes) {
  const mean = state.mixing === "measured" && "depth" in changes ? { mixing: Number(meanMixing().toFixed(3)) } : {};
  state = { ...state, ...mean, ...changes };
  if (state.encoding !== "drawn" && drawing) pencil(false);
  fill();
  remember();
  ask();
}

/** A number within its range, or null. */
function checked(name, text) {
  const [, least, most, step] = NUMBERS[name];
  const value = Number(text);
  if (text === "" || !Number.isFinite(value)) return null;
  const inside = Math.max(least, Math.min(most, value));
  return step === 1 ? Math.round(inside) : inside;
}

function control(name) {
  const row = document.createElement("div");
  row.id = `row-${name}`;
  if (name in CHOICES) {
    const [label, options] = CHOICES[name];
    row.innerHTML = `<label class="wide" for="${name}"></label><select id="${name}"></select>`;
    row.firstChild.textContent = label;
    row.lastChild.replaceChildren(...Object.entries(options).map(([value, text]) => new Option(text, value)));
    row.lastChild.addEventListener("change", ({ target }) => set({ [name]: target.value }));
    return row;
  }
  const [label, least, most, step, way] = NUMBERS[name];
  row.className = "row";
  const inputs = `<input type="range" id="slide-${name}"><input type="number" id="${name}">`;
  row.innerHTML = `<span id="label-${name}"></span>${inputs}`;
  row.firstChild.textContent = label;
  const [slider, box] = [row.children[1], row.children[2]];
  for (const input of [slider, box]) input.setAttribute("aria-labelledby", `label-${name}`);
  Object.assign(box, { min: least, max: most, step: step === 1 ? 1 : "any" });
  const log = way === "log";
  Object.assign(slider, log ? { min: 0, max: 1, step: 0.002 } : { min: least, max: most, step });
  const toValue = (u) => {
    const value = Number((least * (most / least) ** u).toPrecision(2));
    return checked(name, value);
  };
  slider.addEventListener("input", () => set({ [name]: log ? toValue(Number(slider.value)) : Number(slider.value) }));
  box.addEventListener("change", () => {
    const value = checked(name, box.value);
    if (value !== null || EMPTY.has(name)) set({ [name]: value });
    else fill();
  });
  return row;
}

/** Controls from the state. */
function fill() {
  for (const name of ORDER) {
    $(`row-${name}`).hidden = !relevant(name);
    if (name in CHOICES) {
      $(name).value = state[name];
      continue;
    }
    const [, least, most, , way] = NUMBERS[name];
    const own = name === "mixing" && state.mixing === "measured";
    const value = own ? meanMixing() : state[name];
    $(name).value = own ? "" : (value ?? "");
    $(name).placeholder = own ? `~${value.toFixed(3)}` : "";
    const slider = $(`slide-${name}`);
    slider.value = way === "log" ? Math.log(value / least) / Math.log(most / least) : (value ?? least);
    slider.setAttribute("aria-valuetext", own ? `measured, ${value.toFixed(3)} on average` : `${value ?? "none"}`);
  }
  $("preset").value = state.preset;
  $("note").textContent = GIVEN.presets[state.preset]?.note ?? "";
  for (const radio of document.getElementsByName("axis")) radio.checked = radio.value === state.axis;
}

// ---- the URL ----

let later = null;

/** Soon: browsers refuse a page that changes its URL with every step of a slider. */
function remember() {
  clearTimeout(later);
  later = setTimeout(() => history.replaceState(null, "", hash()), 150);
}

function hash() {
  // N in any case where there are runs: a page without them begins at another.
  const isSet = (name) => state[name] !== PLAIN[name] || (name === "n" && runs.length > 0);
  const words = Object.keys(PLAIN).filter((name) => name !== "points" && isSet(name));
  const parts = words.map((name) => `${name}=${encodeURIComponent(state[name])}`);
  if (state.points) {
    const letters = state.points.map((value) =>
      Math.round(((value + NATS) / (2 * NATS)) * (LETTERS - 1))
        .toString(36)
        .padStart(2, "0"),
    );
    parts.push(`points=${letters.join("")}`);
  }
  return `#${parts.join("&")}`;
}

/** Settings from the URL; what it says that is no setting is passed over. */
function recall() {
  const found = beginning();
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (name in NUMBERS) found[name] = checked(name, text) ?? found[name];
    else if (name in CHOICES && Object.hasOwn(CHOICES[name][1], text)) found[name] = text;
    else if (name === "preset" && Object.hasOwn(GIVEN.presets, text)) found.preset = text;
    else if ((name === "axis" || name === "drawnOn") && (text === "position" || text === "distance"))
      found[name] = text;
    else if (name === "points" && /^[0-9a-z]+$/.test(text) && text.length === 2 * POINTS) {
      const values = text.match(/../g).map((letters) => parseInt(letters, 36));
      found.points = values.map((value) => (2 * NATS * value) / (LETTERS - 1) - NATS);
    }
    if (name === "mixing" && text === "measured") found.mixing = text;
  }
  const own = GIVEN.presets[found.preset]?.mixing;
  if (found.mixing === "measured" && own?.length !== found.depth) found.mixing = PLAIN.mixing;
  state = found;
}

// ---- presets, the shell ----

function choose(name) {
  const { settings = {}, mixing } = GIVEN.presets[name] ?? {};
  const { axis } = state;
  state = { ...beginning(), axis, preset: name, ...settings };
  if (mixing) Object.assign(state, { depth: mixing.length, mixing: "measured" });
  if (drawing) pencil(false);
  set({});
}

/** The shell line that computes what is shown. */
function commandOf({ spec: { n, mixing, alphas, slopes, sink, reach, full, prefix }, settings }) {
  const quoted = (text) => (/^[\w.-]+$/.test(text) ? text : `'${text}'`);
  const alike = (values) => values.every((value) => value === values[0]);
  const listed = (values) => (alike(values) ? `${values[0]}` : `[${values.join(", ")}]`);
  const words = ["--depth", mixing.length, "--mixing", listed(mixing), "--length", n];
  if (settings.encoding === "drawn")
    return ["posbias design target.csv --over key_bias", ...words.map(String).map(quoted)].join(" ");
  const variants = (each) => (alike(each) ? each[0] : `[${each.map((one) => `"${one}"`).join(", ")}]`);
  if (alphas) words.push("--encoding", variants(alphas.map((alpha) => `gamma_key(alpha=${alpha})`)));
  if (settings.encoding === "decay") words.push("--encoding", `decay(rate=${Math.exp(-slopes[0])})`);
  if (settings.encoding === "alibi") {
    words.push(
      "--heads",
      slopes.length,
      "--encoding",
      settings.factor === 1 ? "alibi" : `alibi(slopes=[${slopes.join(", ")}])`,
    );
  }
  const window = `sliding_window(width=${reach})`;
  if (reach)
    words.push("--mask", variants(mixing.map((_, layer) => (full && (layer + 1) % full === 0 ? "causal" : window))));
  if (prefix) words.push("--mask", settings.mask === "full" ? "full" : `prefix(length=${prefix})`);
  if (sink !== null) words.push("--sinks", sink);
  return ["posbias predict", ...words.map(String).map(quoted)].join(" ");
}

// ---- the beginning ----

$("sliders").append(...ORDER.map(control));
$("preset").append(
  new Option("your own settings", ""),
  ...Object.keys(GIVEN.presets).map((name) => new Option(name, name)),
);
$("preset").addEventListener("change", ({ target }) => choose(target.value));
$("shapes").append(
  ...Object.entries(SHAPES).map(([name, shape]) => {
    const button = Object.assign(document.createElement("button"), { textContent: name });
    button.addEventListener("click", () => {
      const points = Array.from({ length: POINTS }, (_, k) => shape(k / (POINTS - 1)));
      set({ points, drawnOn: "position", encoding: "drawn" });
    });
    return button;
  }),
);
for (const radio of document.getElementsByName("axis"))
  radio.addEventListener("change", () => set({ axis: radio.value }));
$("link").addEventListener("click", async () => {
  await navigator.clipboard?.writeText(location.href.split("#")[0] + hash()).catch(() => {});
  $("link").textContent = "Copied";
  setTimeout(() => ($("link").textContent = "Copy link"), 1500);
});
$("save").addEventListener("click", () => save("target.csv", shown.wanted));
$("savebias").addEventListener("click", () => save("key_bias.csv", shown.bias));
$("files").addEventListener("change", ({ target }) => take(target.files));
for (const kind of ["dragover", "dragleave", "drop"]) {
  addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files);
  });
}
addEventListener("hashchange", () => {
  recall();
  fill();
  ask();
});
new ResizeObserver(draw).observe($("chart"));
globalThis.explorer = { set, take, answer: () => shown }; // for the console
listenToPencil();
hire();
recall();
fill();
list();
ask();
