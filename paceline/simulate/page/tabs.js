// Tabs as the ARIA practices have them: arrow keys, Home and End move between them, Tab goes on into the panel.

/** The tabs in `list`, each naming its panel by aria-controls; `changed(key)` when a person chooses one. */
export class Tabs {
  constructor(list, changed) {
    this.tabs = [...list.querySelectorAll("[role=tab]")];
    for (const tab of this.tabs) tab.addEventListener("click", () => changed(tab.dataset.tab));
    list.addEventListener("keydown", (event) => this.#key(event, changed));
  }

  #key(event, changed) {
    const last = this.tabs.length - 1, now = this.tabs.indexOf(document.activeElement);
    const to = { ArrowLeft: now ? now - 1 : last, ArrowRight: now < last ? now + 1 : 0, Home: 0, End: last }[event.key];
    if (to === undefined || now < 0) return;
    event.preventDefault();
    changed(this.tabs[to].dataset.tab);
    this.tabs[to].focus();
  }

  show(key) {
    for (const tab of this.tabs) {
      const isChosen = tab.dataset.tab === key;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !isChosen;
    }
  }
}
