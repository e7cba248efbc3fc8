/**
 * Which speed-ups over plain decoding may be shown: the page's copy of `possible_speedup` and `doubt` of
 * paceline/report/statistics.py.
 */

export const BUSY = "the machine was busy: repeat";
export const FEWEST_TOKENS = 100;

const hundredths = (value) => Math.round(100 * value);

/**
 * Why a factor allows no verdict, or "". A round costs at least one pass of the target, so the factor is at most
 * `perRound`.
 */
export function doubt(factor, perRound, numTokens) {
  if (perRound && hundredths(factor) > hundredths(perRound)) return BUSY;
  return numTokens < FEWEST_TOKENS
    ? `${numTokens} tokens are too few for a verdict: time at least ${FEWEST_TOKENS}`
    : "";
}

/** {factor, how, why} of a factor that is possible, {doubt, how, why} of another. */
export function speedup(factor, { how, why, perRound, numTokens }) {
  const found = doubt(factor, perRound, numTokens);
  return found ? { doubt: found, how, why } : { factor, how, why };
}
