// Draws every figure.chart from the JSON beside it, at the width it has: values on hover or by the arrow keys,
// curves hidden by their names in the legend, axes chosen by buttons. Colours follow the page's, dark or light.
"use strict";
(() => {
  const DASHES = {
    solid: "", dash: "8 4", dot: "2 4", dashdot: "8 4 2 4", longdash: "14 5", longdashdot: "14 4 2 4",
  };
  const LEFT = 66, RIGHT = 12, TOP = 10, NEAR = 40, MISSING = 65535, NARROW = 480, LETTER = 7.2, LINE = 15;
  const PAPER = 680, HALF = 326; // widths in print: of a picture, and of one of two side by side
  const INK = "#1a1a1a", FAINT = "#8a8a8a";
  let clips = 0;

  const colour = name =>
    name === INK ? "var(--ink)" : name === FAINT ? "var(--soft)" : `color-mix(in srgb, ${name} var(--keep), white)`;
  const plain = value => {
    const size = Math.abs(value);
    if (size && (size >= 1e6 || size < 1e-4)) return value.toExponential(2).replace(/\.?0+e\+?/, "e");
    return String(Number(value.toPrecision(4)));
  };

  function add(parent, name, attributes = {}, text = "") {
    const svg = parent instanceof SVGElement || name === "svg";
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    parent.append(made);
    return made;
  }

  /** From values to pixels from `begin` to `end`, and the values that are named beside the axis. */
  function scale([low, high], log, begin, end, room, { labels, whole } = {}) {
    const bend = log ? Math.log10 : value => value;
    const [from, to] = [bend(low), bend(high)];
    const place = value => begin + ((end - begin) * (bend(value) - from)) / (to - from);
    const [least, most] = [Math.min(low, high), Math.max(low, high)];
    let ticks = [];
    if (log) {
      const steps = most / least < 300 ? [1, 2, 5] : [1];
      for (let decade = Math.floor(Math.log10(least)); decade <= Math.log10(most); decade++)
        for (const step of steps) ticks.push(Number(`${step}e${decade}`));
      while (ticks.length * room > 2 * Math.abs(end - begin)) ticks = ticks.filter((_, index) => index % 2 === 0);
    } else if (!labels) {
      const rough = Math.max(((most - least) * room) / Math.abs(end - begin), whole ? 1 : 0);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find(each => each * power >= rough);
      for (let count = Math.ceil(least / step); count * step <= most + step * 1e-9; count++) ticks.push(count * step);
    } else ticks = labels.map((_, index) => index + 1);
    const shown = ticks.filter(tick => tick >= least * (1 - 1e-9) && tick <= most + Math.abs(most) * 1e-9);
    return { place, ticks: shown, log, back: pixel => {
      const value = from + ((to - from) * (pixel - begin)) / (end - begin);
      return log ? 10 ** value : value;
    } };
  }

  /** The name below an axis, in as many lines as it needs, and the bottom of the frame above them. */
  function footed(text, { left, width, height }) {
    const begin = width < NARROW || text.length * LETTER > width - left - RIGHT ? 0 : left;
    const words = broken(text, width - begin - RIGHT);
    return { words, middle: (begin + width - RIGHT) / 2, bottom: height - 27 - LINE * words.length };
  }

  /** Grid, ticks, names of the axes, and a group that is cut off at the frame. */
  function frame(svg, x, y, { left, width, foot, y_label, rows, over }) {
    const { bottom } = foot;
    for (const tick of y.ticks) {
      add(svg, "line", { class: "grid", x1: left, x2: width - RIGHT, y1: y.place(tick), y2: y.place(tick) });
      const names = rows ? rows[tick - 1] : [plain(tick)];
      names.forEach((name, index) => {
        const up = over ? -9 - LINE * (names.length - 1 - index) : 4 + LINE * (index - (names.length - 1) / 2);
        add(svg, "text", { x: over ? left + 2 : left - 6, y: y.place(tick) + up, "text-anchor": over ? "start" : "end" }, name);
      });
    }
    for (const tick of x.ticks) {
      add(svg, "line", { class: "grid", x1: x.place(tick), x2: x.place(tick), y1: TOP, y2: bottom });
      add(svg, "text", { x: x.place(tick), y: bottom + 16, "text-anchor": "middle" }, plain(tick));
    }
    add(svg, "path", { class: "axis", d: `M${left} ${TOP}V${bottom}H${width - RIGHT}` });
    const middle = { x: foot.middle, "text-anchor": "middle" };
    foot.words.forEach((line, index) => add(svg, "text", { ...middle, y: bottom + 36 + LINE * index }, line));
    const turned = { transform: `translate(13 ${(TOP + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" };
    const squeezed = y_label.length * LETTER > bottom ? { textLength: bottom - TOP, lengthAdjust: "spacingAndGlyphs" } : {};
    add(svg, "text", { ...turned, ...squeezed }, y_label);
    const clip = `clip-${++clips}`;
    const cut = { x: left, y: TOP - 4, width: width - RIGHT - left + 4, height: bottom - TOP + 8 };
    add(add(svg, "clipPath", { id: clip }), "rect", cut);
    return add(svg, "g", { "clip-path": `url(#${clip})` });
  }

  /** A text in lines that fit, broken at spaces; a word that is longer than a line is broken within. */
  function broken(text, room) {
    const most = Math.max(Math.floor(room / LETTER), 4), found = [""];
    for (const word of text.split(" ")) {
      const longer = `${found.at(-1)} ${word}`.trim();
      if (longer.length <= most) found[found.length - 1] = longer;
      else found.push(...word.match(new RegExp(`.{1,${most}}`, "gu")));
    }
    return found.filter((line, index) => line || !index);
  }

  /** Words above their stretches; those without room beside a wider stretch's are left out. */
  function headed(group, stretches, left, right) {
    const taken = [];
    const labels = stretches.map(({ begin, end, words }) => ({
      label: add(group, "text", { class: "share", y: TOP + 9, "text-anchor": "middle" }, words), begin, end,
    }));
    for (const { label, begin, end } of labels.sort((one, other) => other.end - other.begin - (one.end - one.begin))) {
      const half = label.getComputedTextLength() / 2 + 3;
      const middle = Math.min(Math.max((begin + end) / 2, left + half), right - half);
      label.setAttribute("x", middle);
      if (taken.every(other => Math.abs(other.middle - middle) >= other.half + half)) taken.push({ middle, half });
      else label.remove();
    }
  }

  function canvas(plot, width, height, title) {
    plot.replaceChildren();
    const size = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title, tabindex: 0 };
    return [add(plot, "svg", size), add(plot, "div", { class: "tip", hidden: "", "aria-live": "polite" })];
  }

  /** Moves a cursor over the plot, by pointer or keys; `told(x, y)` gives the lines of the box beside it, if any. */
  function pointing(svg, tip, width, bottom, told) {
    const cursor = add(svg, "line", { class: "cursor", y1: TOP, y2: bottom, visibility: "hidden" });
    let at = width / 2;
    const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    const show = (x, y) => {
      const lines = told(x, y);
      if (!lines.length) return hide();
      at = x;
      tip.textContent = lines.join("\n");
      tip.hidden = false;
      const factor = svg.clientWidth / width;
      const beside = x * factor + 14 + tip.offsetWidth > svg.clientWidth ? x * factor - 14 - tip.offsetWidth : x * factor + 14;
      tip.style.left = `${Math.max(0, beside)}px`;
      tip.style.top = `${TOP}px`;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("visibility", "visible");
    };
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      show(((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * height) / box.height);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key] * (event.shiftKey ? 25 : 3);
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      show(Math.min(Math.max(at + step, LEFT), width - RIGHT), bottom / 2);
    });
  }

  const along = (curve, data, distance) => {
    if (distance) return curve.end || curve.y.map((_, index) => curve.y.length - index);
    return curve.x || curve.y.map((_, index) => index);
  };
  const ends = (curve, index) =>
    curve.low && curve.low[index] !== curve.high[index]
      ? ` [${plain(curve.low[index])}, ${plain(curve.high[index])}]` : "";

  function span(lists) {
    const all = lists.flat().filter(Number.isFinite);
    let [low, high] = [Infinity, -Infinity];
    for (const value of all) { low = Math.min(low, value); high = Math.max(high, value); }
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  }

  function lines(data, state, plot, width) {
    const over = Boolean(data.rows) && width < NARROW; // the name of a row stands above it
    const longest = data.rows ? Math.max(...data.rows.map(row => row.length)) : 0;
    const left = over ? RIGHT : data.rows ? Math.min(12 + LETTER * longest, width * 0.45) : LEFT;
    const rows = data.rows && data.rows.map(row => broken(row, over ? width - left - RIGHT : left - 12));
    const deepest = rows ? Math.max(...rows.map(row => row.length)) : 0;
    const each = over ? 46 + 19 * (deepest - 1) : 26 + LINE * Math.max(deepest - 1.5, 0);
    const labels = data.rows ? [data.y_label, ""] : [state.distance ? data.from_end : data.x_label, data.y_label];
    let height = Math.round(Math.min(Math.max(width * 0.46, 250), 400));
    if (rows) height = 18 + each * rows.length + 27 + LINE * footed(labels[0], { left, width, height }).words.length;
    const foot = footed(labels[0], { left, width, height }), { bottom } = foot;
    const [svg, tip] = canvas(plot, width, height, data.title);
    const shown = data.curves.filter(curve => !state.hidden.has(curve.name));
    const ys = data.curves.flatMap(curve => [curve.y, curve.low || [], curve.high || []]);
    const room = width < NARROW ? 52 : 74;
    const logs = axis => data.log_axes.includes(axis);
    const yLog = data.log && state.log || logs("y");
    let xs = span(data.curves.map(curve => along(curve, data, false)));
    if (state.distance) xs = [1.08 * data.farthest, 0.92];
    let yRange = span(ys);
    if (data.log) yRange = state.log ? data.log : data.linear || yRange;
    else if (!logs("y") && yRange[0] >= 0) yRange = [0, yRange[1] * 1.05];
    else if (logs("y")) {
      const [low, high] = span(ys.map(list => list.filter(value => value > 0))); // an interval that reaches 0 ends at the foot
      yRange = [Math.max(low, 1e-300) / 1.5, Math.max(high, 1e-300) * 1.5];
    }
    const whole = !data.rows && data.curves.every(curve => !curve.x || curve.x.every(Number.isInteger));
    let x = scale(xs, state.distance || logs("x"), left, width - RIGHT, room, { whole });
    let y = scale(yRange, yLog, bottom, TOP, 34);
    if (data.rows) {
      x = scale(span([...ys, [0]]), false, left, width - RIGHT, room);
      y = scale([data.rows.length + 0.6, 0.4], false, bottom, TOP, 20, { labels: data.rows });
    }
    const group = frame(svg, x, y, { left, width, foot, y_label: labels[1], rows, over });
    const safe = value => (yLog && value < 1e-300 ? 1e-300 : value);
    const point = (across, up, most = -9e3, least = 9e3) =>
      `${x.place(across).toFixed(1)} ${Math.max(most, Math.min(least, y.place(safe(up)))).toFixed(1)}`;
    const inside = value => Math.min(Math.max(state.distance ? data.farthest - value : value, Math.min(...xs)), Math.max(...xs));
    const stretches = data.stretches.map(([from, to, words]) => ({ begin: x.place(inside(from)), end: x.place(inside(to)), words }));
    for (const { begin, end } of stretches)
      add(group, "rect", { class: "stretch", x: begin, width: end - begin, y: TOP, height: bottom - TOP });
    const drawn = shown.map(curve => ({ curve, across: along(curve, data, state.distance) }));
    for (const { curve, across } of drawn) {
      const style = `color: ${colour(curve.colour)}`;
      if (data.rows) {
        curve.y.forEach((value, index) => {
          const level = y.place(curve.x[index] + (over ? 0.2 + curve.offset / 2 : curve.offset));
          if (curve.low)
            add(group, "line", { class: "line", style, x1: x.place(curve.low[index]), x2: x.place(curve.high[index]), y1: level, y2: level });
          add(group, "circle", { class: "dot", style, cx: x.place(value), cy: level, r: 3.5 });
        });
        continue;
      }
      if (curve.low) {
        const outline = [...curve.high.map((value, index) => point(across[index], value, TOP, bottom)),
          ...curve.low.map((value, index) => point(across[index], value, TOP, bottom)).reverse()];
        add(group, "path", { class: "band", style, d: `M${outline.join("L")}Z` });
      }
      const path = { class: "line", style, "stroke-width": curve.bold ? 2.4 : 1.8, "stroke-dasharray": DASHES[curve.dash] };
      if (data.lines) add(group, "path", { ...path, d: `M${curve.y.map((value, index) => point(across[index], value)).join("L")}` });
      if (data.markers)
        curve.y.forEach((value, index) => {
          const [cx, cy] = point(across[index], value).split(" ");
          add(group, "circle", { class: "dot", style, cx, cy, r: data.lines ? 2.6 : 4 });
        });
    }
    headed(group, stretches, left, width - RIGHT);
    if (data.rows) add(group, "line", { class: "axis", x1: x.place(0), x2: x.place(0), y1: TOP, y2: bottom });
    pointing(svg, tip, width, bottom, (px, py) => {
      if (data.rows) {
        const row = Math.round(y.back(py));
        const found = shown.flatMap(curve => curve.y.map((value, index) =>
          curve.x[index] === row ? `${curve.name}: ${plain(value)}${ends(curve, index)}` : "").filter(Boolean));
        return found.length ? [data.rows[row - 1], ...found] : [];
      }
      const told = [];
      let place = null;
      for (const { curve, across } of drawn) {
        let best = 0;
        across.forEach((value, index) => {
          if (Math.abs(x.place(value) - px) < Math.abs(x.place(across[best]) - px)) best = index;
        });
        const apart = Math.abs(x.place(across[best]) - px);
        if (curve.y.length === 2 && data.lines && curve.y[0] === curve.y[1]) told.push(`${curve.name}: ${plain(curve.y[0])}`);
        else if (apart < NEAR) {
          place = place ?? across[best];
          told.push(`${curve.name}: ${plain(curve.y[best])}${ends(curve, best)}`);
        }
      }
      return place === null ? [] : [`${labels[0]}: ${plain(place)}`, ...told];
    });
  }

  function decoded(text) {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    return new Uint16Array(bytes.buffer);
  }

  function shade(stops, share) {
    const place = share * (stops.length - 1), index = Math.min(Math.floor(place), stops.length - 2);
    return [1, 3, 5].map(start => {
      const [from, to] = [index, index + 1].map(each => parseInt(stops[each].slice(start, start + 2), 16));
      return Math.round(from + (to - from) * (place - index));
    });
  }

  function picture(panel, stops) {
    const image = Object.assign(document.createElement("canvas"), { width: panel.columns, height: panel.rows });
    const context = image.getContext("2d"), pixels = context.createImageData(panel.columns, panel.rows);
    panel.levels.forEach((level, index) => {
      if (level !== MISSING) pixels.data.set([...shade(stops, level / (MISSING - 1)), 255], 4 * index);
    });
    context.putImageData(pixels, 0, 0);
    return image.toDataURL();
  }

  function heat(data, plot, legend, width) {
    plot.replaceChildren();
    const columns = width < 600 ? 1 : data.columns;
    const each = Math.floor(width / columns), height = Math.round(Math.min(Math.max(each * 0.8, 200), 420));
    const value = level => {
      const found = data.limits[0] + ((data.limits[1] - data.limits[0]) * level) / (MISSING - 1);
      return data.logarithmic ? 10 ** found : found;
    };
    const named = data.rows.length ? data.rows : null;
    for (const panel of data.panels) {
      panel.levels = panel.levels || decoded(panel.values);
      const cell = add(plot, "div", { class: "panel", style: `width: ${100 / columns}%` });
      if (panel.name) add(cell, "b", {}, panel.name);
      const box = add(cell, "div");
      const [svg, tip] = canvas(box, each, height, `${data.title} ${panel.name}`);
      const half = ([from, to], count) => (to - from) / Math.max(count - 1, 1) / 2 || 0.5;
      const [dx, dy] = [half(data.x, panel.columns), half(data.y, panel.rows)];
      const foot = footed(data.x_label, { left: LEFT, width: each, height }), { bottom } = foot;
      const whole = Number.isInteger((data.x[1] - data.x[0]) / Math.max(panel.columns - 1, 1));
      const x = scale([data.x[0] - dx, data.x[1] + dx], false, LEFT, each - RIGHT, 74, { whole });
      x.ticks = x.ticks.filter(tick => tick >= data.x[0] - 1e-9 && tick <= data.x[1] + 1e-9);
      if (panel.columns * 50 < each - LEFT - RIGHT && panel.columns <= 12)
        x.ticks = Array.from({ length: panel.columns }, (_, column) => data.x[0] + 2 * dx * column);
      const y = scale([data.y[1] + dy, data.y[0] - dy], false, bottom, TOP, 34, { whole: true, labels: named });
      const rows = named && named.map(name => [name]);
      const group = frame(svg, x, y, { left: LEFT, width: each, foot, y_label: data.y_label, rows });
      const area = { x: LEFT, y: TOP, width: each - RIGHT - LEFT, height: bottom - TOP };
      panel.image = panel.image || picture(panel, data.stops);
      add(group, "image", { ...area, href: panel.image, preserveAspectRatio: "none", style: "image-rendering: pixelated" });
      pointing(svg, tip, each, bottom, (px, py) => {
        const column = Math.floor(((px - LEFT) / area.width) * panel.columns);
        const row = Math.floor(((py - TOP) / area.height) * panel.rows);
        if (column < 0 || row < 0 || column >= panel.columns || row >= panel.rows) return [];
        const level = panel.levels[row * panel.columns + column];
        if (data.words.length) return data.words[row * panel.columns + column].split("\n");
        const places = `${data.x_label}: ${plain(x.back(px))}\n${data.y_label}: ${plain(y.back(py))}`;
        return [places, level === MISSING ? "nothing here" : `${data.value_label}: ${plain(value(level))}`];
      });
    }
    const [low, high] = [value(0), value(MISSING - 1)].map(plain);
    legend.replaceChildren();
    add(legend, "span", {}, `${data.value_label}: ${low}`);
    add(legend, "span", { class: "ramp", style: `background: linear-gradient(to right, ${data.stops.join(", ")})` });
    add(legend, "span", {}, high + (data.logarithmic ? ", by its logarithm" : ""));
  }

  function choice(controls, names, chosen, pick) {
    const group = add(controls, "span", { role: "group" });
    names.forEach((name, index) => {
      const button = add(group, "button", { type: "button", "aria-pressed": index === chosen }, name);
      button.addEventListener("click", () => {
        [...group.children].forEach((other, place) => other.setAttribute("aria-pressed", place === index));
        pick(index);
      });
    });
  }

  function chart(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const [plot, legend, controls] = ["plot", "legend", "controls"].map(name => figure.querySelector(`.${name}`));
    for (const curve of data.curves || []) Object.assign(curve, data.places[curve.place]);
    const state = { hidden: new Set(), log: Boolean(data.log), distance: data.by_distance };
    let drawnAt = 0;
    const draw = width => {
      drawnAt = width || plot.clientWidth;
      if (!drawnAt) return;
      cut.textContent = state.log ? "" : data.cut || "";
      if (data.panels) heat(data, plot, legend, drawnAt);
      else lines(data, state, plot, drawnAt);
    };
    if (data.log) {
      choice(controls, ["log scale", "linear scale"], state.log ? 0 : 1, index => { state.log = !index; draw(); });
    }
    if (data.farthest)
      choice(controls, ["by position", "by distance from the end"], Number(state.distance), index => {
        state.distance = Boolean(index);
        draw();
      });
    const cut = add(controls, "span", { class: "cut" });
    for (const curve of data.curves || []) {
      const button = add(legend, "button", { type: "button", "aria-pressed": true, style: `color: ${colour(curve.colour)}` });
      const swatch = add(button, "svg", { viewBox: "0 0 34 10", "aria-hidden": true });
      if (data.lines && !data.rows)
        add(swatch, "path", { class: "line", d: "M1 5H33", "stroke-width": 2.4, "stroke-dasharray": DASHES[curve.dash] });
      else add(swatch, "circle", { class: "dot", cx: 17, cy: 5, r: 4 });
      add(button, "span", {}, curve.name);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(curve.name)) state.hidden.add(curve.name);
        button.setAttribute("aria-pressed", !state.hidden.has(curve.name));
        draw();
      });
    }
    draw();
    new ResizeObserver(() => requestAnimationFrame(() => { if (plot.clientWidth !== drawnAt) draw(); })).observe(plot);
    figure.closest("details")?.addEventListener("toggle", () => draw());
    window.addEventListener("beforeprint", () => draw(figure.matches(".pair > :not(:only-child)") ? HALF : PAPER));
    window.addEventListener("afterprint", () => draw());
  }

  document.querySelectorAll("figure.chart").forEach(chart);
})();
