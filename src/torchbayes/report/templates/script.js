// Without this script the page still has all its tables and figures. The script adds light and dark, a
// choice of methods, sorting, values at the pointer, and the image picker. It loads and sends nothing.
(function () {
  "use strict";
  const root = document.documentElement;
  const all = (selector, inside) => Array.from((inside || document).querySelectorAll(selector));
  const byId = (id) => document.getElementById(id);

  for (const words of all("[data-script]")) words.hidden = false;

  // --- light and dark ------------------------------------------------------------------------------
  function stored(value) {
    // A page opened from a file may not be allowed to store anything.
    try {
      if (value) localStorage.setItem("torchbayes-theme", value);
      return localStorage.getItem("torchbayes-theme");
    } catch (error) {
      return null;
    }
  }
  const kept = stored();
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  const theme = byId("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    stored(root.dataset.theme);
  });

  // --- which methods are shown, in every table and figure --------------------------------------------
  // The style sheet hides the methods whose boxes are not ticked; the script keeps the boxes in step.
  const chooser = byId("chooser");
  const every = byId("every");
  const boxes = chooser ? all("input", chooser) : [];
  const box = (m) => byId("show-" + m);
  const shown = (node) => !box(node.dataset.m) || box(node.dataset.m).checked;
  if (chooser) {
    const count = () => {
      const on = boxes.filter((one) => one.checked).length;
      if (every) every.checked = on === boxes.length;
      byId("chosen").textContent = on === boxes.length ? "" : on + " of " + boxes.length;
    };
    const set = (wanted) => {
      for (const one of boxes) one.checked = wanted(one);
      count();
    };
    const choices = { all: () => true, none: () => false, first: (one) => one.defaultChecked };
    chooser.addEventListener("change", count);
    for (const button of all("[data-choose]", chooser)) {
      button.addEventListener("click", () => set(choices[button.dataset.choose]));
    }
    if (every) every.addEventListener("change", () => set(every.checked ? choices.all : choices.first));
    document.addEventListener("click", (event) => {
      if (!chooser.contains(event.target)) chooser.open = false;
    });
    chooser.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        chooser.open = false;
        chooser.querySelector("summary").focus();
      }
    });
    // A browser may restore earlier choices after a reload.
    if (every && every.checked) set(choices.all);
    else count();
  }

  // --- folded parts: a link into one opens it ------------------------------------------------------------
  function unfold() {
    const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const inside = target.tagName === "SECTION" ? target.querySelector("details.fold") : target.closest("details");
    if (inside && !inside.open) {
      inside.open = true;
      target.scrollIntoView();
    }
  }
  addEventListener("hashchange", unfold);
  unfold();

  // --- sorting -----------------------------------------------------------------------------------------
  // The first click puts the best on top, the second the worst; the third restores the original order.
  function number(cell) {
    const data = cell.querySelector("data");
    const text = data ? data.getAttribute("value") : cell.textContent.replace("−", "-");
    return parseFloat(text);
  }
  for (const table of all("table.sortable")) {
    const body = table.tBodies[0];
    const original = Array.from(body.rows);
    const headers = Array.from(table.tHead.rows[table.tHead.rows.length - 1].cells);
    headers.forEach((header, column) => {
      const name = header.firstChild.textContent.trim();
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.setAttribute("aria-label", "Sort by " + name);
      const arrow = header.querySelector("span[aria-hidden]");
      if (arrow) arrow.replaceWith(button); // it shows the same arrow
      else header.append(" ", button);
      button.addEventListener("click", () => {
        const better = header.dataset.better === "high" ? "descending" : "ascending";
        const worse = better === "ascending" ? "descending" : "ascending";
        const now = header.getAttribute("aria-sort");
        const next = now === better ? worse : now === worse ? null : better;
        for (const other of headers) other.removeAttribute("aria-sort");
        const rows = original.slice();
        if (next) {
          header.setAttribute("aria-sort", next);
          const sign = next === "ascending" ? 1 : -1;
          rows.sort((a, b) => {
            if (column === 0) return sign * a.cells[0].textContent.localeCompare(b.cells[0].textContent);
            const [x, y] = [number(a.cells[column]), number(b.cells[column])];
            if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y); // undefined values come last
            return sign * (x - y);
          });
        }
        body.append(...rows);
      });
    });
  }

  // --- values at the pointer ---------------------------------------------------------------------------
  const tip = byId("tip");
  function place(x, y) {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - box.width - 16 : x + 16;
    tip.style.left = Math.max(4, Math.min(left, innerWidth - box.width - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(y - box.height / 2, innerHeight - box.height - 4)) + "px";
  }
  function hide() {
    tip.hidden = true;
    for (const guide of all(".crosshair")) guide.remove();
  }
  for (const title of all("svg.plot title")) {
    title.parentNode.dataset.hint = title.textContent; // shown immediately; the browser would delay it
    title.remove();
  }
  document.addEventListener("pointermove", (event) => {
    const node = event.target.closest ? event.target.closest("[data-hint]") : null;
    if (event.target.closest && event.target.closest("svg[data-x]")) return;
    if (node) {
      tip.textContent = node.dataset.hint;
      place(event.clientX, event.clientY);
    } else hide();
  });
  function scale(text) {
    const [low, high, start, end, kind, unit, ...label] = text.split("|");
    const f = kind === "log" ? Math.log10 : (v) => v;
    const [a, b] = [f(+low), f(+high)];
    return {
      start,
      end,
      label: label.join("|"),
      value: (at) => {
        const v = a + ((at - start) / (end - start)) * (b - a);
        return kind === "log" ? Math.pow(10, v) : v;
      },
      show: (v) => (unit ? Number((100 * v).toPrecision(4)) + " %" : String(Number(v.toPrecision(3)))),
    };
  }
  for (const svg of all("svg[data-x]")) {
    const [xs, ys] = [scale(svg.dataset.x), scale(svg.dataset.y)];
    const lines = all("path.line[data-m]", svg).map((path) => ({
      path,
      points: path.getAttribute("d").slice(1).split("L").map((pair) => pair.split(",").map(Number)),
    }));
    const size = svg.viewBox.baseVal;
    const show = (x, y, clientX, clientY) => {
      const found = [];
      for (const { path, points } of lines) {
        if (!shown(path)) continue;
        let best = points[0];
        for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
        found.push({ path, point: best });
      }
      hide();
      if (!found.length) return;
      const nearest = found.reduce((a, b) => (Math.abs(b.point[0] - x) < Math.abs(a.point[0] - x) ? b : a));
      const at = nearest.point[0];
      const guide = document.createElementNS("http://www.w3.org/2000/svg", "path");
      guide.setAttribute("d", "M" + at + "," + ys.end + "V" + ys.start);
      guide.setAttribute("class", "crosshair guide");
      svg.append(guide);
      // Of many lines, show those nearest to the pointer, from top to bottom as in the figure.
      found.sort((a, b) => Math.abs(a.point[1] - y) - Math.abs(b.point[1] - y));
      const near = found.slice(0, 10).sort((a, b) => a.point[1] - b.point[1]);
      tip.textContent = "";
      const head = document.createElement("b");
      head.textContent = xs.label + " " + xs.show(xs.value(at));
      tip.append(head);
      for (const { path, point } of near) {
        const row = document.createElement("div");
        const dot = document.createElement("i");
        dot.className = path.getAttribute("class").replace("line", "dot");
        row.append(dot, path.dataset.name + " ");
        const value = document.createElement("span");
        value.textContent = ys.show(ys.value(point[1]));
        row.append(value);
        tip.append(row);
      }
      place(clientX, clientY);
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const unit = size.width / box.width;
      show((event.clientX - box.left) * unit, (event.clientY - box.top) * unit, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", hide);
    // The same with the keyboard: the arrow keys move from point to point.
    svg.setAttribute("tabindex", "0");
    let index = 0;
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      const seen = lines.filter((line) => shown(line.path));
      if (!seen.length) return;
      const points = seen.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
      const step = Math.max(1, Math.round(points.length / 40));
      index = Math.max(0, Math.min(points.length - 1, index + (event.key === "ArrowLeft" ? -step : step)));
      const box = svg.getBoundingClientRect();
      const [x, y] = points[index];
      show(x, y, box.left + (x * box.width) / size.width, box.top + (y * box.width) / size.width);
    });
    svg.addEventListener("blur", hide);
  }
  addEventListener("scroll", hide, { passive: true });

  // --- the image picker --------------------------------------------------------------------------------
  const picker = byId("picker");
  if (picker) {
    const thumbs = all(".thumb", picker);
    const names = all("#class-names li").map((item) => item.textContent);
    const table = picker.querySelector("table");
    const rows = Array.from(table.tBodies[0].rows);
    const pick = (thumb) => {
      for (const other of thumbs) other.setAttribute("aria-pressed", String(other === thumb));
      const image = thumb.querySelector("img");
      byId("picked-image").src = image.src;
      byId("picked-image").alt = image.alt;
      byId("picked-group").textContent = thumb.dataset.group;
      byId("picked-text").replaceChildren(...Array.from(thumb.querySelector(".words").cloneNode(true).childNodes));
      const classes = thumb.dataset.classes.split(",").map(Number);
      const truth = thumb.dataset.true === "" ? -1 : Number(thumb.dataset.true);
      all(".class-name", table).forEach((header, i) => {
        header.textContent = names[classes[i]];
        header.classList.toggle("true", classes[i] === truth);
      });
      const probs = thumb.dataset.probs.split(";").map((row) => row.split(",").map(Number));
      const doubts = thumb.dataset.doubts.split(";").map((row) => row.split(",").map(Number));
      const methods = thumb.dataset.methods.split(",");
      rows.forEach((row) => {
        const m = methods.indexOf(row.dataset.m);
        row.hidden = m < 0;
        if (m < 0) return;
        const most = Math.max(...probs[m]);
        all(".cell", row).forEach((cell, i) => {
          const share = probs[m][i] / 1000;
          cell.textContent = share < 0.005 ? "·" : Math.round(100 * share) + " %";
          cell.style.setProperty("--p", share);
          cell.classList.toggle("strong", share > 0.55);
          cell.classList.toggle("true", classes[i] === truth);
          cell.classList.toggle("first-choice", probs[m][i] === most);
        });
        all(".doubt", row).forEach((cell, i) => {
          cell.textContent = (doubts[m][i] / 1000).toFixed(2);
        });
      });
    };
    thumbs.forEach((thumb, i) => {
      thumb.addEventListener("click", () => pick(thumb));
      thumb.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        const next = step && thumbs[i + step];
        if (!next) return;
        event.preventDefault();
        next.focus();
        pick(next);
      });
    });
    picker.hidden = false;
    byId("cards").classList.add("without-script");
    pick(thumbs[0]);
  }
})();
