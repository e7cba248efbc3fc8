// When each token of an answer comes, as it is predicted: plain decoding one a round, with drafts in bursts. Pure
// functions on numbers;
// paceline.bench.pages.predicted does the same, number for number.

const GOLDEN = 0.6180339887498949;
const SPEEDS = [1, 0.5, 0.25, 0.1], LEAST_S = 3;

/**
 * Drafts that stand in round `number`, 1 for the first: as often as `survival` says, spread evenly over the rounds and
 * not drawn.
 */
export function keptDrafts(survival, number) {
  const share = (number * GOLDEN) % 1;
  return survival.filter((each) => each > share).length;
}

/** [{at_s, round, is_drafted}] of `count` tokens; a first one after `first_s`, then rounds of `round_s` seconds. */
export function tokenTimes(survival, { first_s, round_s }, count) {
  const found = [{ at_s: first_s, round: 0, is_drafted: false }];
  for (let round = 1; found.length < count; round += 1) {
    const kept = keptDrafts(survival, round), at_s = first_s + round * round_s;
    for (let place = 0; place <= kept; place += 1) found.push({ at_s, round, is_drafted: place < kept });
  }
  return found.slice(0, count);
}

/** How fast to replay at first: as it is, or so much slower that the eye can follow. */
export const usualSpeed = (end_s) => SPEEDS.find((speed) => end_s / speed >= LEAST_S) ?? SPEEDS[SPEEDS.length - 1];
