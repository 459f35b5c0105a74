"""Compiled inner loops of the kernels: decaying running sums, windows and direct sums over distances.

Nothing here subtracts, so every entry of a sum of non-negative terms keeps its relative accuracy, however small it is.
Positions are walked in blocks of `BLOCK`: inside a block a plain recurrence, between blocks a carry that is moved by an
accurately computed power and added with compensation, so that rounding does not grow with the context length.
Compiled functions are `no_type_check`: a run-time type checker around them could not be compiled.
"""

from typing import no_type_check

import numpy as np
from numba import njit

BLOCK = 64
"""Positions between two re-anchorings of a recurrence: rounding in a block stays under 64 units of the last digit."""

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


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def scan_heads(signal, inside, outside, rates, powers, carry, spill, out):
    """out_t = sum_h outside_th S_th with S_th = sum_{u<t} rate_h^(t-u-1) inside_uh signal_u, continued from carry.

    inside and outside are [1 or n, head]: one row stands for all positions. powers[d, head] = rate^d, d = 0 ... BLOCK.
    carry and spill hold the state of each head and are updated to the end of the signal.
    """
    heads = rates.size
    inside_step = 1 if inside.shape[0] > 1 else 0
    outside_step = 1 if outside.shape[0] > 1 else 0
    local = np.empty(heads)
    for start in range(0, signal.size, BLOCK):
        stop = min(signal.size, start + BLOCK)
        local[:] = 0.0
        for t in range(start, stop):
            value = signal[t]
            inside_row = t * inside_step
            outside_row = t * outside_step
            total = 0.0
            for head in range(heads):
                state = local[head]
                total += outside[outside_row, head] * (state + powers[t - start, head] * carry[head])
                local[head] = rates[head] * state + inside[inside_row, head] * value
            out[t] = total
        for head in range(heads):
            factor = powers[stop - start, head]
            carry[head], spill[head] = _advance(carry[head], spill[head], factor, local[head])


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
def carry_heads(signal, tables, weights, carried, out, backward):
    """out_t = sum_h weights_h (read_th S_h + direct_th signal_t), after which S_h is decay_th S_h + write_th signal_t.

    tables are (read, decay, write, direct), each [n, head]. Positions are walked up, or `backward` from the last down.
    carried [head] is S at the beginning of the walk, and is updated to its end.
    """
    read, decay, write, direct = tables
    heads = weights.size
    for step in range(signal.size):
        t = signal.size - 1 - step if backward else step
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
def sweep_gamma(signal, alphas, weights, out, backward):
    """`carry_heads` over a whole context for r_j = alpha / (j + alpha), without tables."""
    heads = weights.size
    scaled = weights * alphas
    carried = np.zeros(heads)
    inverse = np.zeros(heads)
    for step in range(signal.size):
        t = signal.size - 1 - step if backward else step
        value = signal[t]
        position = float(t)
        total = 0.0
        for head in range(heads):
            inverse[head] = 1.0 / (position + alphas[head])
        if backward:
            for head in range(heads):
                part = (carried[head] + value) * inverse[head]
                total += scaled[head] * part
                carried[head] = position * part if part > TINY else 0.0
        else:
            for head in range(heads):
                part = (position * carried[head] + alphas[head] * value) * inverse[head]
                total += weights[head] * part
                carried[head] = part if part > TINY else 0.0
        out[t] = total


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def sweep_covariance(signal, row, parameters, gamma, weights, pushed, derivatives):
    """One walk up causal heads: pushed = sum_h weights_h A_h signal, derivatives_h = row (dA_h / dparameter) signal.

    Parameters are rates exp(-slope), differentiated by the slope, or exponents of gamma keys. A query gives `share` to
    itself and the rest to the mean over the keys before, so dA signal, the covariance of signal and the derivative of
    the keys' logits, is updated as such; `lead` is how far that of a query's own key lies above its mean over the keys
    before.
    """
    heads = weights.size
    mean = np.zeros(heads)
    covariance = np.zeros(heads)
    ahead = np.zeros(heads)
    last = np.full(heads, 1.0 if gamma else 0.0)
    share = np.empty(heads)
    lead = np.empty(heads)
    derivatives[:] = 0.0
    for t in range(signal.size):
        position = float(t)
        total = 0.0
        # Short loops over heads, which processors take several heads at a time.
        if gamma:
            for head in range(heads):
                lead[head] = ahead[head] + last[head]
                last[head] = 1.0 / (position + parameters[head])
                share[head] = parameters[head] * last[head]
        else:
            for head in range(heads):
                lead[head] = ahead[head] + 1.0
                last[head] = 1.0 + parameters[head] * last[head]
                share[head] = 1.0 / last[head]
        for head in range(heads):
            step = share[head] * (signal[t] - mean[head])
            moved = (1.0 - share[head]) * (covariance[head] + lead[head] * step)
            covariance[head] = moved if abs(moved) > TINY else 0.0
            ahead[head] = (1.0 - share[head]) * lead[head]
            mean[head] += step
            total += weights[head] * mean[head]
            derivatives[head] += row[t] * covariance[head]
        pushed[t] = total
