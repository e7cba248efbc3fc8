/** The conversation in this browser's storage, so that a reload keeps it. */

const KEY = "paceline-conversation";
const storage = (() => { try { return localStorage; } catch { return null; } })();  // refused where cookies are

/** Keeps `turns`, a list of {prompt, reply}; an empty list deletes it. False if the browser has no room for it. */
export function keep(turns) {
  if (!storage) return turns.length === 0;
  try {
    if (turns.length) storage.setItem(KEY, JSON.stringify(turns));
    else storage.removeItem(KEY);
    return true;
  } catch {
    storage.removeItem(KEY);  // an older state would come back in place of this one
    return false;
  }
}

const isTurn = (turn) =>
  typeof turn?.prompt === "string" && typeof turn.reply?.text === "string" && Array.isArray(turn.reply.marks);

/** The turns kept, [] if there are none; what another version kept in another form is deleted. */
export function kept() {
  try {
    const turns = JSON.parse(storage?.getItem(KEY) ?? "[]");
    if (Array.isArray(turns) && turns.every(isTurn)) return turns;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  storage.removeItem(KEY);
  return [];
}
