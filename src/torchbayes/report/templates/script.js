(function () {
  "use strict";
  var root = document.documentElement;
  var button = document.getElementById("theme");
  function stored(value) {
    // A page opened from a file may not be allowed to keep anything.
    try {
      if (value) localStorage.setItem("torchbayes-theme", value);
      return localStorage.getItem("torchbayes-theme");
    } catch (error) {
      return null;
    }
  }
  var kept = stored();
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  button.hidden = false;
  button.addEventListener("click", function () {
    var system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    var now = root.dataset.theme || system;
    root.dataset.theme = now === "dark" ? "light" : "dark";
    stored(root.dataset.theme);
  });
})();
