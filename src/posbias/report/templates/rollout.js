// Residual rollout of the last position, and the key bias with a chosen profile (docs/theory, sections 1 and 7).
//
// x <- (1 - m) x + m x A from the top layer down, in O(N) per layer and head without an N x N matrix. Every sum has
// non-negative terms only, so that tiny values keep their relative accuracy. Numbers are those of the Python library.

const TINY = 1e-290; // sums below it count as zero: denormal numbers are slow, and a decaying one never ends
const STRIDE = 32; // steps of a recurrence after which it is seen whether its sum has become tiny
const TOGETHER_FROM = 64; // reach from which four heads are summed at once: each block costs a beginning of its own
const SUMMED_TO = 3; // reach per head up to which every key of a window is added by itself, of all heads at once
const SETTLED = 40; // nats after which a geometric sum no longer changes
const MOST_NATS = 600;
const MOST_ALPHA = 1e12;
const EXACT_TO = 2; // times the least slope, up to which slopes are never replaced
const ROUNDING = 1e-15;
const LOST = 1e-13; // of the heads' whole weight: orthogonality held
const ROUGH = 1e-3; // relative, of a first view while a slider moves
const MOST_KEPT = 2e7; // entries of tables that are kept between layers (160 MB)

/** ALiBi's published slopes for any number of heads (Press et al. 2022). */
export function alibiSlopes(heads) {
  const power = 2 ** Math.floor(Math.log2(heads));
  const slopes = Array.from({ length: power }, (_, head) => 2 ** ((-8 * (head + 1)) / power));
  return slopes.concat(Array.from({ length: heads - power }, (_, head) => 2 ** ((-8 * (2 * head + 1)) / (2 * power))));
}

/** P(K = k), K the number of layers in which a path takes an attention step. */
export function attentionSteps(mixing) {
  let steps = [1];
  for (const m of mixing) {
    steps = [...steps, 0].map((kept, k) => kept * (1 - m) + (k ? steps[k - 1] * m : 0));
  }
  return steps;
}

/** Exponents of gamma keys that hold the power law j^(first - 1) at every length; first = 1 is flat. */
export function telescopingAlphas(first, mixing) {
  if (mixing.filter((m) => m === 1).length > 1) {
    throw new Error("Mixing is 1 in more than one layer: gamma keys that hold their shape at every length allow one.");
  }
  const last = mixing.indexOf(1);
  let alpha = first;
  const alphas = mixing.map((m) => {
    const mine = alpha;
    if (m < 1) alpha /= 1 - m;
    return mine;
  });
  if (last >= 0) alphas[last] = alpha;
  const largest = Math.max(...alphas);
  if (largest > MOST_ALPHA) {
    throw new Error(`So many layers need gamma keys with alpha ${largest.toPrecision(3)}; at most 1e12 is allowed.`);
  }
  return alphas;
}

/**
 * Heads by their slopes, [slope, weight] each: equal slopes as one, and many as fewer that have the same mean.
 *
 * What a head gives, in any row, under any window, prefix or sink, is analytic in the logarithm of its slope up to an
 * imaginary part of pi / 2, so a Gauss quadrature of the heads' own measure converges geometrically: some 30 positive
 * weights stand for any number of heads in eight octaves, to rounding. The least octave stays as it is, and with it the
 * relative accuracy of what is far; a rough view does without both. Slopes in narrow clusters, of which the quadrature
 * loses weight, stay as they are.
 */
function meanHeads(slopes, rough) {
  const weights = new Map();
  for (const slope of slopes) weights.set(slope, (weights.get(slope) ?? 0) + 1 / slopes.length);
  const all = [...weights];
  const least = rough ? 0 : EXACT_TO * Math.min(...slopes.filter((slope) => slope > 0));
  const kept = all.filter(([slope]) => slope <= least);
  const steep = all.filter(([slope]) => slope > least);
  const places = steep.map(([slope]) => Math.log(slope));
  const spread = Math.max(...places) - Math.min(...places);
  if (!(spread > 0)) return all; // one slope, or none
  const enough = Math.ceil(-Math.log(rough ? ROUGH : ROUNDING) / (2 * Math.asinh(Math.PI / spread)));
  const count = 4 * Math.ceil((enough + kept.length) / 4) - kept.length; // four heads are summed at once
  if (count > 0.75 * steep.length) return all;
  const nodes = quadrature(places, steep.map(([, weight]) => weight), count);
  const few = [...kept, ...nodes.map(([place, weight]) => [Math.exp(place), weight])];
  const total = few.reduce((sum, [, weight]) => sum + weight, 0);
  return Math.abs(total - 1) < LOST ? few : all;
}

/** Nodes [place, weight] of the Gauss quadrature of weights at places, by the Stieltjes procedure and Sturm counts. */
function quadrature(places, weights, count) {
  const weighed = (values) => weights.reduce((sum, weight, i) => sum + weight * values[i], 0);
  const first = 1 / Math.sqrt(weights.reduce((sum, weight) => sum + weight, 0));
  const [least, most] = [Math.min(...places), Math.max(...places)];
  const [centres, squares] = [[], [0]];
  let [before, now] = [places.map(() => 0), places.map(() => first)]; // orthonormal polynomials
  for (let k = 0; k < count; k++) {
    centres.push(weighed(places.map((place, i) => place * now[i] ** 2)));
    const next = places.map((place, i) => (place - centres[k]) * now[i] - Math.sqrt(squares[k]) * before[i]);
    squares.push(weighed(next.map((value) => value ** 2)));
    [before, now] = [now, next.map((value) => value / Math.sqrt(squares[k + 1]))];
  }
  const nodesBelow = (place) => {
    let [below, pivot] = [0, 1];
    for (let k = 0; k < count; k++) below += (pivot = centres[k] - place - squares[k] / (pivot || TINY)) < 0;
    return below;
  };
  return centres.map((_, node) => {
    let [low, high] = [least, most];
    for (let place; (place = (low + high) / 2) > low && place < high; ) {
      if (nodesBelow(place) > node) high = place;
      else low = place;
    }
    let [inverse, one, two] = [0, 0, first];
    for (let k = 0; k < count; k++) {
      inverse += two ** 2;
      [one, two] = [two, ((low - centres[k]) * two - Math.sqrt(squares[k]) * one) / Math.sqrt(squares[k + 1])];
    }
    return [low, 1 / inverse];
  });
}

/** Heads whose logits fall by `slope` per position, under a mask of a reach back and a mutual prefix. */
class LinearHeads {
  constructor({ n, heads, reach, prefix, sink }) {
    Object.assign(this, { n, reach: Math.min(reach, n), prefix: Math.min(prefix, n) });
    this.sink = sink === null ? 0 : Math.exp(sink);
    this.heads = heads.map(([slope, weight]) => {
      const settled = slope > 0 ? Math.ceil(SETTLED / slope) + 1 : n;
      const rows = Math.min(n, Math.max(Math.min(settled, this.reach), this.prefix + 1));
      return { slope, rate: Math.exp(-slope), weight, settled: Math.min(settled, n), rows };
    });
    this.kept = this.heads.reduce((sum, { rows }) => sum + rows + (this.reach < n ? this.reach : 0), 0) < MOST_KEPT;
    this.short = this.reach < n && !this.prefix && this.reach <= SUMMED_TO * this.heads.length;
  }

  /** Of a short window: what row i gives to the key d before it, over all heads; the last of the rows stands for the rest. */
  window() {
    if (this.weights) return this.weights;
    const { reach, heads } = this;
    const rows = Math.max(...heads.map((head) => head.rows));
    const weights = new Float64Array(rows * reach);
    for (const { inverse, powers } of heads.map((head) => this.tables(head))) {
      for (let i = 0; i < rows; i++) {
        const own = inverse[Math.min(i, inverse.length - 1)];
        for (let d = 0; d < reach; d++) weights[i * reach + d] += own * powers[d];
      }
    }
    return (this.weights = weights);
  }

  /** weight / normaliser of the first rows, of which the last stands for the rest; powers of the rate in a window. */
  tables(head) {
    if (head.tables) return head.tables;
    const { slope, rate, weight, settled } = head;
    const sums = new Float64Array(settled); // of rate^d over d = 0 ... k
    for (let k = 0, sum = 0; k < settled; k++) sums[k] = sum = 1 + rate * sum;
    const inverse = new Float64Array(head.rows);
    for (let i = 0; i < head.rows; i++) {
      const before = sums[Math.min(i, this.reach - 1, settled - 1)];
      const after = i < this.prefix ? sums[Math.min(this.prefix - 1 - i, settled - 1)] - 1 : 0;
      inverse[i] = weight / (before + after + this.sink);
    }
    const powers = new Float64Array(this.reach < this.n ? this.reach : 0);
    for (let d = 0; d < powers.length; d++) powers[d] = Math.exp(-slope * d);
    const tables = { inverse, powers, rate };
    if (this.kept) head.tables = tables;
    return tables;
  }

  /** out = row A, the mean over heads; what lies before `from` is 0, in the row and in what it gives. */
  pull(row, out, from) {
    const { n, reach, heads } = this;
    out.fill(0);
    if (this.short) {
      addWindow(row, out, this.window(), reach, from);
      return;
    }
    const together = reach < TOGETHER_FROM ? 0 : heads.length - (heads.length % 4);
    for (let first = 0; first < together; first += 4) {
      const four = heads.slice(first, first + 4).map((head) => this.tables(head));
      for (let start = reach * Math.floor((n - 1) / reach); start > from - reach && start >= 0; start -= reach) {
        const end = Math.min(start + reach, n);
        addFour(row, out, four, start, end);
        if (end < n) addFourNext(row, out, four, start, end);
      }
    }
    for (const head of heads.slice(together)) addOne(row, out, this.tables(head), reach, from);
    if (this.prefix) addForward(row, out, heads.map((head) => this.tables(head)), this.prefix);
  }
}

/**
 * out_j += sum over d < reach of rate^d inverse_(j+d) row_(j+d), in blocks of j as long as the reach (the last is shorter).
 *
 * What lies in the block by recurrence, in the next by a running sum: nothing that leaves a window is subtracted.
 */
function addOne(row, out, { inverse, powers, rate }, reach, from) {
  const [n, settled, rest] = [row.length, inverse.length - 1, inverse[inverse.length - 1]];
  for (let start = reach * Math.floor((n - 1) / reach); start > from - reach && start >= 0; start -= reach) {
    const end = Math.min(start + reach, n);
    for (let j = end - 1, sum = 0; j >= start; j--) {
      sum = rate * sum + (j < settled ? inverse[j] : rest) * row[j];
      if (sum < TINY) sum = 0;
      out[j] += sum;
    }
    for (let j = start + 1, i = end, sum = 0; j < end && end < n; j++, i++) {
      if (i < n) sum += powers[i - end] * ((i < settled ? inverse[i] : rest) * row[i]);
      out[j] += powers[end - j] * sum;
    }
  }
}

/** What lies in the block, of four heads at once, since a recurrence waits for its own last step. */
function addFour(row, out, [{ inverse: a, rate: rateA }, { inverse: b, rate: rateB }, ...others], start, end) {
  const [{ inverse: c, rate: rateC }, { inverse: d, rate: rateD }] = others;
  const [endA, endB, endC, endD] = [a.length - 1, b.length - 1, c.length - 1, d.length - 1];
  const [restA, restB, restC, restD] = [a[endA], b[endB], c[endC], d[endD]];
  const settled = Math.max(endA, endB, endC, endD);
  let [sumA, sumB, sumC, sumD] = [0, 0, 0, 0];
  for (let done = end; done > start; ) {
    const first = Math.max(done > settled ? Math.max(settled, start) : start, done - STRIDE);
    if (sumA < TINY) sumA = 0;
    if (sumB < TINY) sumB = 0;
    if (sumC < TINY) sumC = 0;
    if (sumD < TINY) sumD = 0;
    if (first >= settled) {
      for (let j = done - 1; j >= first; j--) {
        sumA = rateA * sumA + restA * row[j];
        sumB = rateB * sumB + restB * row[j];
        sumC = rateC * sumC + restC * row[j];
        sumD = rateD * sumD + restD * row[j];
        out[j] += sumA + sumB + (sumC + sumD);
      }
    } else {
      for (let j = done - 1; j >= first; j--) {
        sumA = rateA * sumA + (j < endA ? a[j] : restA) * row[j];
        sumB = rateB * sumB + (j < endB ? b[j] : restB) * row[j];
        sumC = rateC * sumC + (j < endC ? c[j] : restC) * row[j];
        sumD = rateD * sumD + (j < endD ? d[j] : restD) * row[j];
        out[j] += sumA + sumB + (sumC + sumD);
      }
    }
    done = first;
  }
}

/** What lies in the next block, of four heads at once. */
function addFourNext(row, out, four, start, end) {
  const [a, b, c, d] = four.map(({ inverse }) => inverse);
  const [p, q, r, s] = four.map(({ powers }) => powers);
  const [endA, endB, endC, endD] = [a.length - 1, b.length - 1, c.length - 1, d.length - 1];
  const [restA, restB, restC, restD] = [a[endA], b[endB], c[endC], d[endD]];
  let [sumA, sumB, sumC, sumD] = [0, 0, 0, 0];
  const reached = Math.min(row.length - end, end - start - 1);
  for (let k = 0, i = end, back = end - start - 1; back > 0; k++, i++, back--) {
    if (k < reached) {
      sumA += p[k] * ((i < endA ? a[i] : restA) * row[i]);
      sumB += q[k] * ((i < endB ? b[i] : restB) * row[i]);
      sumC += r[k] * ((i < endC ? c[i] : restC) * row[i]);
      sumD += s[k] * ((i < endD ? d[i] : restD) * row[i]);
    }
    out[end - back] += p[back] * sumA + q[back] * sumB + (r[back] * sumC + s[back] * sumD);
  }
}

/** Every key of a short window by itself: out_j += sum over d < reach of weights_(j+d, d) row_(j+d), four keys at once. */
function addWindow(row, out, weights, reach, from) {
  const [n, last] = [row.length, weights.length / reach - 1];
  const rest = weights.subarray(last * reach);
  let j = n - 1;
  for (const whole = n - reach - 3; j > whole && j >= from; j--) addKey(row, out, weights, reach, last, j);
  for (const least = Math.max(from, last) + 3; j >= least; j -= 4) {
    let [sumA, sumB, sumC, sumD] = [0, 0, 0, 0];
    let [a, b, c] = [row[j - 3], row[j - 2], row[j - 1]];
    for (let d = 0, i = j; d < reach; d++, i++) {
      const weight = rest[d];
      const next = row[i];
      sumA += weight * a;
      sumB += weight * b;
      sumC += weight * c;
      sumD += weight * next;
      [a, b, c] = [b, c, next];
    }
    out[j - 3] = sumA < TINY ? 0 : sumA;
    out[j - 2] = sumB < TINY ? 0 : sumB;
    out[j - 1] = sumC < TINY ? 0 : sumC;
    out[j] = sumD < TINY ? 0 : sumD;
  }
  for (; j >= from; j--) addKey(row, out, weights, reach, last, j);
}

function addKey(row, out, weights, reach, last, j) {
  let sum = 0;
  for (let d = 0, i = j; d < reach && i < row.length; d++, i++) sum += weights[Math.min(i, last) * reach + d] * row[i];
  out[j] = sum < TINY ? 0 : sum;
}

/** The first `prefix` positions see each other forwards: out_j += sum over i < j < prefix of rate^(j-i) inverse_i row_i. */
function addForward(row, out, heads, prefix) {
  const rates = Float64Array.from(heads, ({ rate }) => rate);
  const sums = new Float64Array(heads.length);
  for (let j = 1; j < prefix; j++) {
    const before = row[j - 1];
    let total = 0;
    for (let head = 0; head < rates.length; head++) {
      const sum = rates[head] * (sums[head] + heads[head].inverse[j - 1] * before);
      total += sums[head] = sum < TINY ? 0 : sum;
    }
    out[j] += total;
  }
}

/** Causal keys of weight w_j by their shares r_j = w_j / (w_0 + ... + w_j) and 1 - r_j. */
function pullShares(row, out, { share, kept }) {
  let behind = 0;
  for (let j = row.length - 1; j >= 0; j--) {
    const all = behind + row[j];
    out[j] = share[j] * all;
    behind = all < TINY ? 0 : kept[j] * all;
  }
}

/** Gamma keys: r_j = alpha / (j + alpha). */
function pullGamma(row, out, alpha) {
  let behind = 0;
  for (let j = row.length - 1; j >= 0; j--) {
    const part = (behind + row[j]) / (j + alpha);
    out[j] = alpha * part;
    behind = part < TINY ? 0 : j * part;
  }
}

/**
 * The rollout profile of the last of n positions; with a sink it sums to less than 1.
 *
 * mixing: m of every layer. Then one of: slopes, one per head (0: no encoding), with reach and prefix (positions),
 * every `full`-th layer without window (0: none), a sink's logit or null, and rough, a first view; alphas, of gamma keys
 * by layer; keys, the shares of `keyBias`.
 */
export function rollout({ n, mixing, slopes, reach = n, prefix = 0, full = 0, sink = null, rough, alphas, keys }) {
  const heads = slopes && meanHeads(slopes, rough);
  const seen = heads && new LinearHeads({ n, heads, reach, prefix, sink });
  const whole = heads && full && reach < n ? new LinearHeads({ n, heads, reach: n, prefix, sink }) : seen;
  const row = new Float64Array(n);
  const pulled = new Float64Array(n);
  row[n - 1] = 1;
  let from = n - 1; // the first position that anything has come to
  for (let layer = mixing.length - 1; layer >= 0; layer--) {
    const m = mixing[layer];
    if (m === 0) continue;
    if (keys) pullShares(row, pulled, keys);
    else if (alphas) pullGamma(row, pulled, alphas[layer]);
    else {
      const mask = full && (layer + 1) % full === 0 ? whole : seen;
      from = Math.max(0, from - mask.reach + 1);
      mask.pull(row, pulled, from);
    }
    for (let j = 0; j < n; j++) row[j] = m * pulled[j] + (1 - m) * row[j];
  }
  return row;
}

/** What position j would get with share r; its slope by r; and the terms that the next position starts from. */
function polynomial(states, r, steps, terms) {
  let [total, slope, term, rise] = [0, 0, 0, 0];
  for (let k = 0; k < states.length; k++) {
    rise = term + r * rise;
    term = states[k] + r * term;
    terms[k] = term;
    total += steps[k + 1] * term;
    slope += steps[k + 1] * rise;
  }
  return [r * total, total + r * slope];
}

/**
 * The key bias, one for all layers, with this profile under a causal mask: exact, one root per position from the last.
 *
 * Returns bias (nats, the middle of its range at 0), its range, and the keys' shares.
 */
export function keyBias(profile, mixing) {
  const n = profile.length;
  const steps = attentionSteps(mixing);
  if (steps[0] === 1) throw new Error("Mixing is 0 in every layer: attention moves nothing, and no key bias helps.");
  const moved = Float64Array.from(profile);
  moved[n - 1] -= steps[0];
  const upTo = new Float64Array(n);
  for (let j = 0, sum = 0; j < n; j++) upTo[j] = sum += moved[j];
  const [share, kept] = [new Float64Array(n), new Float64Array(n)];
  const [states, terms] = [new Float64Array(mixing.length), new Float64Array(mixing.length)];
  states[0] = 1;
  for (let j = n - 1; j >= 0; j--) {
    let r = 1;
    if (j > 0) {
      const wanted = (moved[j] / upTo[j]) * polynomial(states, 1, steps, terms)[0];
      for (let step = 0; step < 200; step++) {
        const [mass, slope] = polynomial(states, r, steps, terms);
        const lower = r - (mass - wanted) / slope;
        if (!(lower < r)) break;
        r = Math.max(lower, 0);
      }
    }
    polynomial(states, r, steps, terms);
    share[j] = r;
    kept[j] = 1 - r;
    for (let k = 0; k < states.length; k++) states[k] = kept[j] * terms[k];
  }
  return { share, kept, ...biasOf(share, kept) };
}

/** b_j from the shares: W_j = W_(j-1) / (1 - r_j), w_j = r_j W_j. */
function biasOf(share, kept) {
  const bias = new Float64Array(share.length);
  let [total, low, high] = [0, Infinity, -Infinity];
  for (let j = 0; j < bias.length; j++) {
    if (j > 0) total -= Math.log(kept[j]);
    bias[j] = Math.log(share[j]) + total;
    low = Math.min(low, bias[j]);
    high = Math.max(high, bias[j]);
  }
  if (!(high - low <= MOST_NATS)) {
    throw new Error(`This target needs key biases that span more than ${MOST_NATS} nats; draw one nearer to even.`);
  }
  for (let j = 0; j < bias.length; j++) bias[j] -= (low + high) / 2;
  return { bias, range: high - low };
}

/** Where position j of n lies on an axis, 0 to 1: by position, or by the logarithm of the distance from the end. */
export function along(axis, j, n) {
  if (n === 1) return 0;
  return axis === "distance" ? 1 - Math.log(n - j) / Math.log(n) : j / (n - 1);
}

/**
 * A whole profile from a drawn curve: ln(influence / even share) at equal steps of an axis.
 *
 * last null: the curve is what attention moves, and the residual stream adds P0 = prod (1 - m) to the last position;
 * else the share of the last position, refused unless above P0.
 */
export function targetProfile({ values, axis, last }, n, mixing) {
  const target = new Float64Array(n);
  let sum = 0;
  for (let j = 0; j < n; j++) {
    const at = along(axis, j, n) * (values.length - 1);
    const left = Math.min(Math.floor(at), values.length - 2);
    sum += target[j] = Math.exp(values[left] + (at - left) * (values[left + 1] - values[left]));
  }
  const least = mixing.reduce((product, m) => product * (1 - m), 1);
  if (last !== null && !(last > least && last < 1)) {
    throw new Error(
      `The last token cannot have ${percent(last)}: the residual stream alone leaves ${percent(least)} there. ` +
        "Give it more than that, and less than all; or raise mixing or depth.",
    );
  }
  const others = last === null ? 1 - least : ((1 - last) * sum) / (sum - target[n - 1]);
  for (let j = 0; j < n; j++) target[j] *= others / sum;
  target[n - 1] = last === null ? target[n - 1] + least : last;
  return target;
}

/** Wasserstein-1 distance of two profiles of one length, positions scaled to [0, 1]. */
export function wasserstein(one, other) {
  let [gap, sum] = [0, 0];
  for (let j = 0; j < one.length - 1; j++) sum += Math.abs((gap += one[j] - other[j]));
  return sum / Math.max(one.length - 1, 1);
}

/** Share of a profile between two fractions of the context; cells on the border count by the part inside. */
export function shareOfSpan(profile, start, stop) {
  const n = profile.length;
  let sum = 0;
  for (let j = Math.floor(start * n); j < Math.min(n, Math.ceil(stop * n)); j++) {
    sum += profile[j] * Math.max(0, Math.min(j + 1, stop * n) - Math.max(j, start * n));
  }
  return sum;
}

/** A share in percent; the space before the sign does not break. */
export function percent(share) {
  const value = 100 * share;
  const digits = value >= 10 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toPrecision(1);
  return `${value > 0 && value < 0.01 ? value.toExponential(0) : value ? digits : 0}\u00a0%`;
}

/** A profile in a sentence, for anybody; the last token, which a residual stream keeps, counts apart. */
export function verdict(profile) {
  const n = profile.length;
  const own = profile[n - 1];
  const shares = [shareOfSpan(profile, 0, 0.1), shareOfSpan(profile, 0.1, 0.9), shareOfSpan(profile, 0.9, 1) - own];
  const [first, middle, last] = shares.map(
    (share, part) => share / (1 - own) / ([0.1, 0.8, 0.1 - 1 / n][part] * (n / (n - 1))),
  );
  const above = (one, other) => one > 1.1 * other;
  let word = "Even";
  if (n <= 10) word = "A short context";
  else if (own > 0.5) word = "Looks at itself";
  else if (above(first, middle) && above(last, middle)) word = "Loses the middle";
  else if (above(middle, first) && above(middle, last)) word = "Favours the middle";
  else if (above(first, last)) word = "Favours the beginning";
  else if (above(last, first)) word = "Favours the end";
  const [a, b, c] = shares.map((share) => percent(Math.max(share, 0)));
  return (
    `${word}: of the influence on the last output, the first tenth of the context has ${a}, ` +
    `the eight tenths between ${b}, the last tenth ${c}, and the last token itself ${percent(own)}. ` +
    "Even would be 10, 80 and 10 %."
  );
}

/** All that the page asks for at once: {spec, target, measured} to profile, what the sink took, key bias, distances. */
export function answer({ spec, target, measured }) {
  const began = performance.now();
  const wanted = target && targetProfile(target, spec.n, spec.mixing);
  const designed = wanted && keyBias(wanted, spec.mixing);
  const profile = rollout(designed ? { ...spec, keys: designed } : spec);
  const took = performance.now() - began;
  const total = spec.sink === null ? 1 : profile.reduce((sum, value) => sum + value, 0);
  if (total < 1) for (let j = 0; j < spec.n; j++) profile[j] /= total;
  let missed = 0;
  for (let j = 0; wanted && j < spec.n; j++) missed = Math.max(missed, Math.abs(profile[j] / wanted[j] - 1));
  const flat = new Float64Array(spec.n).fill(1 / spec.n);
  const comparable = measured.map((each) => each.length === spec.n);
  return {
    profile,
    wanted,
    missed,
    bias: designed?.bias,
    range: designed?.range,
    sunk: 1 - total,
    verdict: verdict(profile),
    flat: wasserstein(profile, flat),
    distances: measured.map(
      (each, index) => comparable[index] && [wasserstein(profile, each), wasserstein(flat, each)],
    ),
    took,
  };
}
