"use strict";

// The server draws each section; what changed comes as HTML by server-sent events and takes the old one's place.
const state = document.getElementById("state");
const stream = new EventSource("stream");

stream.addEventListener("open", () => { state.textContent = "live"; });
stream.addEventListener("error", () => { state.textContent = "not connected; trying again"; });
stream.addEventListener("sections", (event) => {
  for (const [name, html] of Object.entries(JSON.parse(event.data))) {
    replace(document.getElementById(name), html);
  }
});

// Tables that somebody has opened stay open, and the keyboard stays where it is.
function replace(section, html) {
  const open = [...section.querySelectorAll("details")].map((details) => details.open);
  const focused = [...section.querySelectorAll("summary")].indexOf(document.activeElement);
  section.innerHTML = html;
  section.querySelectorAll("details").forEach((details, at) => { details.open = open[at] ?? false; });
  if (focused >= 0) { section.querySelectorAll("summary")[focused]?.focus(); }
}
