// The two charts of the explorer, and the pencil.

const LOWEST = -6; // decades below an even share that a chart shows
let canvas = null; // of the chart as drawn: its frame, and the vertical range in decades
let stroke = null; // while one is drawn: the vertical range, and the last point
let cursor = null; // 0 ... 1 along the axis
const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const positionAt = (axis, u, n) => (axis === "distance" ? n - n ** (1 - u) : u * (n - 1));

/** An SVG path through values over positions; where many share a pixel, through the least and the largest of them. */
function pathOf(values, x, y) {
  const n = values.length;
  const columns = Math.max(1, Math.ceil(x(1) - x(0)));
  const parts = [];
  for (let column = 1, j = 0; column <= columns && j < n; column++) {
    const end = column === columns ? n - 1 : Math.min(n - 1, Math.floor(positionAt(state.axis, column / columns, n)));
    if (end - j < 2) {
      for (; j <= end; j++) parts.push(`${x(along(state.axis, j, n)).toFixed(1)},${y(values[j]).toFixed(1)}`);
      continue;
    }
    let [low, high] = [Infinity, -Infinity];
    const first = values[j];
    for (; j <= end; j++) {
      if (values[j] < low) low = values[j];
      if (values[j] > high) high = values[j];
    }
    const at = x((column - 0.5) / columns).toFixed(1);
    const both = Math.abs(first - low) < Math.abs(first - high) ? [low, high] : [high, low];
    parts.push(...both.map((value) => `${at},${y(value).toFixed(1)}`));
  }
  return `M${parts.join("L")}`;
}

/** Decades that all curves need, from a part of an even share on. */
function decades(curves) {
  let [low, high] = [drawing ? -2 : -0.5, drawing ? 2 : 0.5];
  for (const { values } of curves) {
    let [least, most] = [Infinity, 0];
    for (const value of values) {
      if (value < least) least = value;
      if (value > most) most = value;
    }
    low = Math.min(low, Math.log10(least * values.length));
    high = Math.max(high, Math.log10(most * values.length));
  }
  return [Math.max(LOWEST, Math.floor(low * 2) / 2), Math.ceil(high * 2) / 2];
}

function frame(svg) {
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  const box = { left: 54, right: width - 14, top: 26, bottom: height - 40 };
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return { ...box, x: (u) => box.left + u * (box.right - box.left) };
}

function horizontal(box, n) {
  const narrow = box.right - box.left < 500;
  const ticks = [];
  if (state.axis === "distance") {
    for (let far = 1; far <= n; far *= 10) ticks.push([along("distance", n - far, n), number(far)]);
  } else {
    const rough = (n - 1) / (narrow ? 3 : 6);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(1, [1, 2, 5, 10].find((each) => each * power >= rough) * power);
    for (let j = 0; j < n; j += step) ticks.push([along("position", j, n), number(j)]);
  }
  const title = state.axis === "distance" ? "distance from the end (1 is the last)" : "position";
  const marks = ticks.map(([u, text]) => {
    const anchor = u > 0.96 ? "end" : "middle";
    return upright(box, box.x(u)) + words(text, box.x(u), box.bottom + 16, anchor);
  });
  return marks.join("") + words(title, (box.left + box.right) / 2, box.bottom + 33);
}

const level = (box, height, sort = "") =>
  `<line class="${sort}" x1="${box.left}" x2="${box.right}" y1="${height}" y2="${height}"/>`;
const upright = (box, x, sort = "") => `<line class="${sort}" x1="${x}" x2="${x}" y1="${box.top}" y2="${box.bottom}"/>`;
const words = (text, x, y, anchor = "middle") => `<text x="${x}" y="${y}" text-anchor="${anchor}">${text}</text>`;
const mark = (box, height, text) => level(box, height) + words(text, box.left - 7, height + 4, "end");

function vertical([low, high], box) {
  const names = { "-2": "0.01", "-1": "0.1", 0: "1", 1: "10", 2: "100" };
  const step = high - low > 7 ? 2 : 1;
  let marks = "";
  for (let decade = Math.ceil(low / step) * step; decade <= high; decade += step) {
    const height = box.bottom - ((decade - low) / (high - low)) * (box.bottom - box.top);
    marks += mark(box, height, names[decade] ?? `10<tspan dy="-5" font-size="10">${decade}</tspan>`);
  }
  return marks + words("times an even share", box.left, 16, "start");
}

function draw() {
  if (!shown || !$("chart").clientWidth) return;
  const curves = shown.runs.map((run, index) => ({ values: run.values, sort: `m${index % 4}`, name: run.name }));
  curves.push({ values: shown.profile, sort: "profile", name: "this architecture" });
  const wanted = shown.wanted && { values: shown.wanted, sort: "target", name: "drawn target" };
  if (wanted) curves.push(wanted);
  const range = stroke?.range ?? decades(curves);
  const box = frame($("chart"));
  const [low, high] = range;
  const scale = (box.bottom - box.top) / (high - low);
  const y = (n) => (value) => box.bottom - (Math.max(Math.log10(value * n), low - 1) - low) * scale;
  const lines = curves.map(
    ({ values, sort }) => `<path class="${sort}" d="${pathOf(values, box.x, y(values.length))}"/>`,
  );
  const size = `width="${box.right - box.left + 3}" height="${box.bottom - box.top + 6}"`;
  $("chart").innerHTML = [
    `<clipPath id="inside"><rect x="${box.left}" y="${box.top - 3}" ${size}/></clipPath>`,
    horizontal(box, shown.spec.n) + vertical(range, box) + level(box, y(1)(1), "flat"),
    `<g clip-path="url(#inside)">${lines.join("")}</g>`,
    cursor === null ? "" : upright(box, box.x(cursor), "cursor"),
  ].join("");
  $("chart").setAttribute("aria-label", `Influence by position, times an even share. ${shown.verdict}`);
  canvas = { box, range };
  legend(curves);
  if (shown.bias) drawBias();
  read();
}

function drawBias() {
  const box = frame($("bias"));
  const [low, high] = [-shown.range / 2 || -1, shown.range / 2 || 1];
  const y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
  $("bias").innerHTML = [
    horizontal(box, shown.spec.n) + words("key bias (nats)", box.left, 16, "start"),
    ...[low, 0, high].map((value) => mark(box, y(value), value.toFixed(1))),
    `<path class="profile" d="${pathOf(shown.bias, box.x, y)}"/>`,
  ].join("");
}

function legend(curves) {
  const entries = [...curves.filter((each) => each.values), { sort: "flat", name: "even share (1/N)" }];
  $("legend").replaceChildren(
    ...entries.map(({ sort, name, values }) => {
      const item = document.createElement("li");
      item.innerHTML = `<svg viewBox="0 0 30 10" aria-hidden="true"><path class="${sort}" d="M0,5L30,5"/></svg>`;
      const length = values && values.length !== shown.spec.n ? ` (${number(values.length)} positions)` : "";
      item.append(name + length);
      return item;
    }),
  );
}

function read() {
  const { profile, flat, distances } = shown;
  const n = profile.length;
  const three = (value) => value.toFixed(3);
  if (cursor === null) {
    const told = shown.runs.map(({ name, values }, index) =>
      distances[index]
        ? `to ${name} ${three(distances[index][0])} (the even line ${three(distances[index][1])})`
        : `to ${name}: set N to ${number(values.length)}`,
    );
    $("reading").textContent =
      `W1 (Wasserstein distance, context scaled to 1): to the even line ${three(flat)}${["", ...told].join("; ")}.`;
    return;
  }
  const j = Math.min(n - 1, Math.round(positionAt(state.axis, cursor, n)));
  const times = profile[j] * n;
  const size = times === 0 ? "0" : times >= 0.01 && times < 1e4 ? times.toPrecision(3) : times.toExponential(1);
  $("reading").textContent =
    `Position ${number(j)} of 0 to ${number(n - 1)} (${number(n - j)} from the end): ` +
    `${percent(profile[j])}, ${size} times an even share.`;
}

// ---- the pencil ----

/** The drawn curve over the axis that is shown. */
function resample() {
  if (state.drawnOn !== state.axis && state.points) {
    const old = curve();
    state.points = old.map((_, k) => {
      const at =
        along(state.drawnOn, Math.min(state.n - 1, positionAt(state.axis, k / (POINTS - 1), state.n)), state.n) *
        (POINTS - 1);
      const left = Math.min(Math.floor(at), POINTS - 2);
      return old[left] + (at - left) * (old[left + 1] - old[left]);
    });
  }
  state.drawnOn = state.axis;
}

/** The drawn curve at the height at which it is shown, scaled to a whole: the pencil goes on where the line is. */
function settle() {
  resample();
  if (!shown.wanted) return;
  const offset = Math.log(shown.wanted[0] * shown.spec.n) - curve()[0];
  state.points = curve().map((value) => bounded(value + offset));
}

const bounded = (value) => Math.max(-NATS, Math.min(NATS, value));

function put(k, value) {
  const points = [...curve()];
  const from = stroke?.last ?? { k, value };
  const steps = Math.max(1, Math.abs(k - from.k));
  for (let step = 0; step <= steps; step++) {
    points[Math.round(from.k + (step / steps) * (k - from.k))] = bounded(
      from.value + (step / steps) * (value - from.value),
    );
  }
  if (stroke) stroke.last = { k, value };
  set({ points, encoding: "drawn" });
}

function pointed(event) {
  const { box, range } = canvas;
  const area = $("chart").getBoundingClientRect();
  const u = Math.max(0, Math.min(1, (event.clientX - area.left - box.left) / (box.right - box.left)));
  const height = (box.bottom - (event.clientY - area.top)) / (box.bottom - box.top);
  return { u, value: Math.LN10 * (range[0] + height * (range[1] - range[0])) };
}

function point(event) {
  if (!shown) return;
  const { u, value } = pointed(event);
  cursor = u;
  if (stroke) put(Math.round(u * (POINTS - 1)), value);
  else draw();
}

function pencil(on) {
  drawing = on;
  $("draw").setAttribute("aria-pressed", on);
  $("draw").textContent = on ? "Drawing: press to stop" : "Draw a target";
  $("chart").classList.toggle("drawing", on);
  if (on) {
    resample();
    set({ encoding: "drawn" });
  } else draw();
}

/** What pointers and keys do on the chart. */
function listenToPencil() {
  $("chart").addEventListener("pointerdown", (event) => {
    if (!drawing || !shown) return;
    event.preventDefault();
    $("chart").setPointerCapture(event.pointerId);
    settle();
    stroke = { range: canvas.range };
    point(event);
  });
  $("chart").addEventListener("pointermove", point);
  for (const end of ["pointerup", "pointercancel"]) {
    $("chart").addEventListener(end, () => {
      stroke = null;
      draw();
    });
  }
  $("chart").addEventListener("pointerleave", () => {
    cursor = null;
    if (!stroke) draw();
  });
  $("chart").addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -POINTS, End: POINTS };
    const turns = drawing ? { ArrowUp: 0.25, ArrowDown: -0.25 } : {};
    if (!(event.key in moves) && !(event.key in turns)) return;
    event.preventDefault();
    const k = Math.round((cursor ?? 0) * (POINTS - 1));
    cursor = Math.max(0, Math.min(POINTS - 1, k + (moves[event.key] ?? 0))) / (POINTS - 1);
    if (event.key in turns) {
      settle();
      put(k, curve()[k] + turns[event.key]);
    } else draw();
  });
  $("draw").addEventListener("click", () => pencil(!drawing));
}
