"use strict";
(() => {
  const root = document.documentElement;

  // A click or a key on a heading sorts a table by the value of its cells, else by their text; blank cells stay last.
  const order = (cell) => cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  const sort = (heading) => {
    const table = heading.closest("table");
    const column = [...heading.parentNode.children].indexOf(heading);
    const first = heading.classList.contains("number") ? "descending" : "ascending";
    const other = first === "descending" ? "ascending" : "descending";
    const direction = heading.getAttribute("aria-sort") === first ? other : first;
    for (const each of table.querySelectorAll("th[aria-sort]")) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const compare = (a, b) => {
      const [one, two] = [order(a.children[column]), order(b.children[column])];
      if (one === "" || two === "") return (one === "") - (two === "");
      return sign * (typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two)));
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  };
  for (const button of document.querySelectorAll("table.sortable th button")) {
    button.addEventListener("click", () => sort(button.parentNode));
  }

  // Show the value of a plot that is nearest to the pointer, or step through the values by the arrow keys.
  const tip = document.getElementById("tip");
  let told = null;
  const hide = () => { tip.hidden = true; told = null; };
  const show = (mark) => {
    const box = mark.getBoundingClientRect();
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const width = tip.offsetWidth;
    const left = Math.min(Math.max(box.x + box.width / 2 - width / 2, 8), root.clientWidth - width - 8);
    const above = box.y - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 0 ? above : box.bottom + 8}px`;
  };
  const REACH = 28;
  for (const plot of document.querySelectorAll(".plot")) {
    const marks = [...plot.querySelectorAll(".mark")];
    for (const mark of marks) {
      const title = mark.querySelector("title");
      mark.dataset.tip = title.textContent;
      title.remove();
    }
    const nearest = (x, y) => {
      let found = null, least = REACH;
      for (const mark of marks) {
        const box = mark.getBoundingClientRect();
        const far = Math.hypot(box.x + box.width / 2 - x, box.y + box.height / 2 - y);
        if (far < least) [found, least] = [mark, far];
      }
      return found;
    };
    plot.addEventListener("pointermove", (event) => {
      const mark = event.target.closest(".mark") || nearest(event.clientX, event.clientY);
      if (mark) show(mark); else hide();
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    let at = -1;
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step || !marks.length) return;
      event.preventDefault();
      at = (at + step + marks.length) % marks.length;
      told = marks[at];
      show(told);
    });
  }
  // Hide the value at the pointer, which is elsewhere now; a value that a key chose stays beside its mark.
  addEventListener("scroll", () => { if (told) show(told); else hide(); }, { passive: true });

  const theme = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.hidden = false;
  name();
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);

  for (const button of document.querySelectorAll(".copy")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
})();
