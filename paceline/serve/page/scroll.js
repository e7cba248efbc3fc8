/** Keeps the end of a growing answer in view, unless the reader scrolled away from it. */

let following = true, frame = 0;

export function follow() {
  if (following && !frame)
    frame = requestAnimationFrame(() => {
      frame = 0;
      scrollTo(0, document.documentElement.scrollHeight);
    });
}

/** Begins or ceases to follow. */
export function setFollowing(on) { following = on; }

/** Follows from now on when the reader scrolls to the end, while `may()`. */
export function watch(may) {
  addEventListener(
    "scroll",
    () => {
      following = may() && innerHeight + scrollY > document.documentElement.scrollHeight - 60;
    },
    { passive: true },
  );
}
