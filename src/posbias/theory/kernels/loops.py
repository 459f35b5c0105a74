"""Compiled inner loops of the kernels: decaying running sums, windows and direct sums over distances.

Nothing here subtracts, so every entry of a sum of non-negative terms keeps its relative accuracy, however small it is.
Positions are walked in blocks of `BLOCK`: inside a block a plain recurrence, between blocks a carry that is moved by an
accurately computed power and added with compensation, so that rounding does not grow with the context length.
Compiled functions are `no_type_check`: a run-time type checker around them could not be compiled.
"""

import math
from typing import no_type_check

import numpy as np
from numba import njit

BLOCK = 64
"""Positions between two re-anchorings of a recurrence: rounding in a block stays under 64 units of the last digit."""

FLAT_NATS = 40.0
"""exp(-40) < 2^-57: past this many nats the geometric sum of a row no longer changes in float64."""

TINY = 1e-300
"""Running sums below this count as zero: it keeps slow denormal numbers out; entries above it are unaffected."""


@njit(cache=True, nogil=True)
@no_type_check
def _advance(carry, spill, factor, addend):
    """carry * factor + addend for one head, with the rounding of the sum kept in spill (all values >= 0)."""
    decayed = factor * carry
    addend = addend + factor * spill
    total = decayed + addend
    lost = (decayed - total) + addend if decayed >= addend else (addend - total) + decayed
    if total < TINY:
        return 0.0, 0.0
    return total, lost


@njit(cache=True, nogil=True)
@no_type_check
def _geometric(slope, count):
    """1 + rate + ... + rate^(count - 1), rate = exp(-slope)."""
    return float(count) if slope == 0.0 else math.expm1(-slope * count) / math.expm1(-slope)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"}, error_model="numpy")
@no_type_check
def sweep_linear(signal, slopes, content, sinks, weights, out):
    """Heads with slopes over earlier keys, weighted: signal @ A, walked down from the last position.

    Row t gives the key at distance d the share off_t rate^(d - 1), and itself own_t: with U_t = 1 + ... + rate^(t - 1)
    off_t : own_t : sink = 1 : exp(content + slope) : exp(sink + slope), over their sum with U_t in place of 1. They are
    divided by the largest, so that nothing overflows. U at the start of a block gives all others in it.
    """
    heads = weights.size
    least, rates = slopes.min(), np.exp(-slopes)
    top = np.maximum(np.maximum(content, sinks) + slopes, 0.0)
    unit, itself = np.exp(-top), np.exp(content + slopes - top)
    beside = itself + np.exp(sinks + slopes - top)
    powers, sums = np.empty((BLOCK + 1, heads)), np.empty((BLOCK + 1, heads))
    for step in range(BLOCK + 1):
        for head in range(heads):
            powers[step, head] = np.exp(-slopes[head] * step)
            sums[step, head] = _geometric(slopes[head], step)
    inside, own = np.empty((BLOCK, heads)), np.empty((BLOCK, heads))
    carry, spill, local = np.zeros(heads), np.zeros(heads), np.zeros(heads)
    blocks = (signal.size + BLOCK - 1) // BLOCK
    settled = False
    for block in range(blocks - 1, -1, -1):
        start = BLOCK * block
        stop = min(signal.size, start + BLOCK)
        for head in range(0 if settled else heads):
            before, factor = _geometric(slopes[head], start), np.exp(-slopes[head] * start)
            for row in range(BLOCK):  # in the order of the walk: compiled, it is twice as fast as the other way round
                seen = before + factor * sums[BLOCK - 1 - row, head]
                inverse = 1.0 / (unit[head] * seen + beside[head])
                inside[row, head] = weights[head] * unit[head] * inverse
                own[row, head] = weights[head] * itself[head] * inverse
            if start == 0:  # the first position sees itself and the sink alone
                inside[BLOCK - 1, head] = 0.0
                own[BLOCK - 1, head] = weights[head] / (1.0 + np.exp(min(sinks[head] - content[head], 700.0)))
        # Rows of the next block are those of this one where geometric sums no longer change.
        settled = least * (start - BLOCK) > FLAT_NATS
        local[:] = 0.0
        for at in range(stop - start):
            place, row = stop - 1 - at, BLOCK - stop + start + at
            value = signal[place]
            total = 0.0
            for head in range(heads):
                total += local[head] + powers[at, head] * carry[head] + own[row, head] * value
                local[head] = rates[head] * local[head] + inside[row, head] * value
            out[place] = total
        for head in range(heads):
            carry[head], spill[head] = _advance(carry[head], spill[head], powers[stop - start, head], local[head])


@njit(cache=True, nogil=True)
@no_type_check
def _scan_stretch(signal, start, stop, rate, low, out):
    """out_t = sum over start <= u < t of rate^(t-u-1) signal_u, for t in start ... stop - 1; low[d] = rate^d."""
    carry = 0.0
    spill = 0.0
    for block in range(start, stop, BLOCK):
        end = min(stop, block + BLOCK)
        local = 0.0
        for t in range(block, end):
            out[t] = local + low[t - block] * carry
            local = rate * local + signal[t]
        carry, spill = _advance(carry, spill, low[end - block], local)


@njit(cache=True, nogil=True)
@no_type_check
def scan_window(signal, rate, window, low, high, out):
    """out_t = sum over 1 <= d <= window of rate^(d-1) signal_(t-d), without subtracting terms that leave the window.

    Two passes over stretches as long as the window (van Herk, Gil and Werman): terms of the same stretch by the
    recurrence, terms of the stretch before by a suffix sum. low[d] = rate^d, high[q] = rate^(BLOCK q).
    """
    n = signal.size
    for start in range(0, n, window):
        _scan_stretch(signal, start, min(n, start + window), rate, low, out)
        if start == 0:
            continue
        suffix = 0.0
        spill = 0.0
        for k in range(window - 1, -1, -1):
            back = window - 1 - k
            term = high[back // BLOCK] * low[back % BLOCK] * signal[start - 1 - back]
            suffix, spill = _advance(suffix, spill, 1.0, term)
            if start + k < n:
                out[start + k] += high[k // BLOCK] * low[k % BLOCK] * suffix


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def correlate_block(signal, weights, window, block, out):
    """out_t += sum_u weights[t-u-1] signal_u over 1 <= t-u <= window, for t, u in block = (t0, t1, u0, u1)."""
    first, last, oldest, newest = block
    for t in range(first, last):
        total = 0.0
        for u in range(max(oldest, t - window), min(newest, t)):
            total += weights[t - u - 1] * signal[u]
        out[t] += total


@njit(cache=True, nogil=True)
@no_type_check
def compensated_sums(values):
    """Running sums of non-negative values, each within a few units in the last place."""
    out = np.empty(values.size)
    total = 0.0
    spill = 0.0
    for index in range(values.size):
        total, spill = _advance(total, spill, 1.0, values[index])
        out[index] = total + spill
    return out


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def carry_heads(signal, tables, weights, carried, out):
    """out_t = sum_h weights_h (read_th S_h + direct_th signal_t), after which S_h is decay_th S_h + write_th signal_t.

    tables are (read, decay, write, direct), each [n, head]. Positions are walked from the last down; carried [head] is
    S at the beginning of the walk, and is updated to its end.
    """
    read, decay, write, direct = tables
    heads = weights.size
    for t in range(signal.size - 1, -1, -1):
        value = signal[t]
        total = 0.0
        for head in range(heads):
            state = carried[head]
            total += weights[head] * (read[t, head] * state + direct[t, head] * value)
            state = decay[t, head] * state + write[t, head] * value
            carried[head] = state if state > TINY else 0.0
        out[t] = total


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def sweep_gamma(signal, alphas, weights, out):
    """`carry_heads` over a whole context for r_j = alpha / (j + alpha), without tables."""
    heads = weights.size
    scaled = weights * alphas
    carried = np.zeros(heads)
    inverse = np.zeros(heads)
    for t in range(signal.size - 1, -1, -1):
        value = signal[t]
        position = float(t)
        total = 0.0
        for head in range(heads):
            inverse[head] = 1.0 / (position + alphas[head])
        for head in range(heads):
            part = (carried[head] + value) * inverse[head]
            total += scaled[head] * part
            carried[head] = position * part if part > TINY else 0.0
        out[t] = total


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def sweep_covariance(signal, row, alphas, weights, pushed, derivatives):
    """One walk up causal heads of gamma keys: pushed = sum_h weights_h A_h signal, derivatives_h = row dA_h signal.

    dA is the derivative by the exponent. A query gives `share` to itself and the rest to the mean over the keys before,
    so dA signal, the covariance of signal and the derivative of the keys' logits, is updated as such; `lead` is how far
    that of a query's own key lies above its mean over the keys before.
    """
    heads = weights.size
    mean = np.zeros(heads)
    covariance = np.zeros(heads)
    ahead = np.zeros(heads)
    inverse = np.ones(heads)
    lead = np.empty(heads)
    derivatives[:] = 0.0
    for t in range(signal.size):
        position = float(t)
        total = 0.0
        # Short loops over heads, which processors take several heads at a time.
        for head in range(heads):
            lead[head] = ahead[head] + inverse[head]
            inverse[head] = 1.0 / (position + alphas[head])
        for head in range(heads):
            share = alphas[head] * inverse[head]
            step = share * (signal[t] - mean[head])
            moved = (1.0 - share) * (covariance[head] + lead[head] * step)
            covariance[head] = moved if abs(moved) > TINY else 0.0
            ahead[head] = (1.0 - share) * lead[head]
            mean[head] += step
            total += weights[head] * mean[head]
            derivatives[head] += row[t] * covariance[head]
        pushed[t] = total
