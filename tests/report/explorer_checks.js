// What the test asks of the explorer, in the browser: its arithmetic on vectors, and the page at two widths.

const theory = await import("/rollout.js");
const given = await (await fetch("/given")).json();
const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const plain = (value) => (ArrayBuffer.isView(value) ? [...value] : value);

async function until(condition) {
  while (!condition()) await wait(20);
}

async function opened(width, hash, name = "explorer.html") {
  const frame = document.createElement("iframe");
  Object.assign(frame, { width, height: 900, src: `/${name}${hash}` });
  document.body.append(frame);
  await new Promise((done) => frame.addEventListener("load", done));
  const page = frame.contentWindow;
  await until(() => page.explorer?.answer());
  return page;
}

const text = (page, id) => page.document.getElementById(id).textContent;

function choose(page, id, value) {
  page.document.getElementById(id).value = value;
  page.document.getElementById(id).dispatchEvent(new Event("change"));
}

/** A stroke through points, each a fraction of the chart's width and height. */
function stroke(page, points) {
  const chart = page.document.getElementById("chart");
  chart.setPointerCapture = () => {}; // only a real pointer can be captured
  const area = chart.getBoundingClientRect();
  const sorts = points.map((_, index) => (index ? "pointermove" : "pointerdown"));
  for (const [index, sort] of [...sorts, "pointerup"].entries()) {
    const [x, y] = points[Math.min(index, points.length - 1)];
    chart.dispatchEvent(
      new PointerEvent(sort, {
        pointerId: 1,
        clientX: area.left + x * area.width,
        clientY: area.top + y * area.height,
        bubbles: true,
      }),
    );
  }
}

async function looks(page) {
  const { scrollWidth, clientWidth } = page.document.documentElement;
  const paths = [...page.document.querySelectorAll("#chart path")].map((path) => path.getAttribute("d").length);
  return {
    overflow: scrollWidth - clientWidth,
    paths,
    verdict: text(page, "verdict"),
    wrong: page.document.getElementById("picture").className,
  };
}

async function run() {
  const found = { profiles: given.profiles.map((spec) => plain(theory.rollout(spec))) };
  found.biases = given.targets.map(({ profile, mixing }) => {
    const { bias, range, share, kept } = theory.keyBias(Float64Array.from(profile), mixing);
    return {
      bias: plain(bias),
      range,
      profile: plain(theory.rollout({ n: profile.length, mixing, keys: { share, kept } })),
    };
  });
  found.slopes = given.heads.map(theory.alibiSlopes);
  found.alphas = given.telescoping.map(([alpha, mixing]) => theory.telescopingAlphas(alpha, mixing));
  const [one, other] = given.pair.map((values) => Float64Array.from(values));
  found.distance = theory.wasserstein(one, other);
  found.tenth = theory.shareOfSpan(one, 0, 0.1);

  const page = await opened(1400, "");
  found.wide = await looks(page);
  found.presets = {};
  for (const name of given.presets) {
    const before = page.explorer.answer();
    choose(page, "preset", name);
    await until(() => page.explorer.answer() !== before);
    const { profile, distances } = page.explorer.answer();
    found.presets[name] = { profile: plain(profile), distances, command: text(page, "command") };
  }
  choose(page, "preset", "");
  page.explorer.set({
    n: 300,
    depth: 6,
    mixing: 0.3,
    mask: "window",
    width: 40,
    full: 3,
    encoding: "alibi",
    heads: 5,
    factor: 2,
    sink: 1.5,
  });
  found.set = { profile: plain(page.explorer.answer().profile), command: text(page, "command") };
  await wait(300); // the URL follows soon
  found.hash = page.location.hash;

  page.document.getElementById("draw").click();
  stroke(page, [
    [0.1, 0.8],
    [0.5, 0.2],
    [0.9, 0.7],
  ]);
  const { profile, wanted, range, spec } = page.explorer.answer();
  found.drawn = {
    profile: plain(profile),
    wanted: plain(wanted),
    range,
    mixing: spec.mixing,
    told: text(page, "range"),
  };
  await wait(300);
  found.drawn.hash = page.location.hash;
  choose(page, "last", "0.05");
  found.refused = await looks(page);
  choose(page, "last", "");

  const fileOf = ({ name, bytes }) =>
    new File([Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0))], name);
  found.damaged = {};
  for (const file of given.damaged.map(fileOf)) {
    await page.explorer.take([file]);
    found.damaged[file.name] = text(page, "runs");
  }
  found.damagedRuns = page.explorer.answer().runs.length;
  await page.explorer.take(given.files.map(fileOf));
  found.dropped = {
    runs: page.explorer.answer().runs.map(({ name, values }) => ({ name, values: plain(values) })),
    n: page.explorer.answer().spec.n,
    told: text(page, "runs"),
  };

  choose(page, "preset", "a residual stream, 24 layers");
  found.dropped.chosen = page.explorer.answer().spec.n;

  const withRuns = await opened(1000, "", "measured.html");
  found.embedded = {
    n: withRuns.explorer.answer().spec.n,
    distances: withRuns.explorer.answer().distances,
    reading: text(withRuns, "reading"),
  };
  choose(withRuns, "preset", "a residual stream, 24 layers");
  await wait(300);
  Object.assign(found.embedded, { chosen: withRuns.explorer.answer().spec.n, hash: withRuns.location.hash });
  found.embedded.asked = (await opened(1000, "#n=300", "measured.html")).explorer.answer().spec.n;

  const narrow = await opened(390, found.drawn.hash);
  found.narrow = { ...(await looks(narrow)), wanted: plain(narrow.explorer.answer().wanted) };
  // More than is computed at once.
  narrow.explorer.set({
    encoding: "decay",
    slope: 0.001,
    n: 200000,
    depth: 12,
    mixing: 0.2,
    mask: "causal",
    sink: null,
  });
  await until(() => narrow.explorer.answer().spec.n === 200000);
  found.worker = plain(narrow.explorer.answer().profile);
  // So much that a rough view comes first.
  narrow.explorer.set({ encoding: "alibi", heads: 128, factor: 1, n: 4000, depth: 128, mixing: 0.1 });
  await until(() => narrow.explorer.answer().spec.n === 4000);
  found.rough = { ...narrow.explorer.answer().spec, profile: plain(narrow.explorer.answer().profile) };
  await until(() => !narrow.explorer.answer().spec.rough);
  found.exact = plain(narrow.explorer.answer().profile);
  return found;
}

const errors = [];
addEventListener("error", (event) => errors.push(event.message));
const found = await run().catch((error) => ({ error: `${error.message} ${error.stack}` }));
await fetch("/found", { method: "POST", body: JSON.stringify({ ...found, errors }) });
