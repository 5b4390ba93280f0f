// Reads the figures every five seconds while the page is visible, and shows the screen that the address names.

const EVERY_MS = 5000;
const DEADLINE_MS = 25000;

const page = {
  token: "", // in memory alone
  reply: null,
  repliedAt: 0,
  failure: "",
  failedAt: 0,
  timer: 0,
  isReading: false,
};
const at = (id) => document.getElementById(id);
const isVisible = () => document.visibilityState === "visible";
const secondsSince = (moment) => (performance.now() - moment) / 1000;

function screenName() {
  const name = location.hash.slice(1);
  return Object.prototype.hasOwnProperty.call(SCREENS, name) ? name : "cluster";
}

async function read() {
  clearTimeout(page.timer);
  if (page.isReading || !isVisible() || !at("ask").hidden) {
    return;
  }
  page.isReading = true;
  const stop = new AbortController();
  const deadline = setTimeout(() => stop.abort(), DEADLINE_MS);
  try {
    await take(await request(stop.signal));
  } catch (error) {
    fail(stop.signal.aborted ? `no answer came within ${DEADLINE_MS / 1000} s` : error.message);
  } finally {
    clearTimeout(deadline);
    page.isReading = false;
    page.timer = setTimeout(read, EVERY_MS);
    show();
  }
}

async function request(signal) {
  const headers = page.token ? { Authorization: `Bearer ${page.token}` } : {};
  try {
    return await fetch("status.json", { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch {
    throw new Error("the coordinator cannot be reached");
  }
}

async function take(response) {
  let reply;
  try {
    reply = await response.json();
  } catch {
    reply = null;
  }
  if (response.status === 401) {
    askForToken(page.token ? "The coordinator does not take this token." : "The coordinator asks for a token.");
  } else if (!response.ok) {
    const reason = recordOf(reply).error;
    throw new Error(typeof reason === "string" ? textOf(reason) : `the coordinator answered ${response.status}`);
  } else if (!isRecord(reply) || !isRecord(reply.status)) {
    throw new Error("the answer was cut, or is not one of a coordinator");
  } else {
    page.reply = reply;
    page.repliedAt = performance.now();
    page.failure = "";
  }
}

function fail(text) {
  if (!page.failure) {
    page.failedAt = performance.now();
  }
  page.failure = text;
}

function askForToken(why) {
  page.token = "";
  page.reply = null; // figures go with the right to see them
  page.failure = "";
  at("why").textContent = why;
  at("ask").hidden = false;
  at("token").focus();
}

function show() {
  showLink();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${screenName()}`) {
      link.setAttribute("aria-current", "page");
    } else {
      link.removeAttribute("aria-current");
    }
  }
  const main = at("main");
  if (!page.reply) {
    main.replaceChildren();
    at("wrong").hidden = true;
    setText(at("identity"), "");
    document.title = "Sparserow";
    return;
  }
  const { status } = page.reply;
  const where = `cluster ${textOf(status.cluster_id)} at ${textOf(page.reply.coordinator)}`;
  setText(at("identity"), `${where}${scopeOf(page.reply)}: ${stateOf(status)}`);
  showWrong(status);
  if (main.dataset.screen !== screenName()) {
    main.dataset.screen = screenName();
    main.replaceChildren();
  }
  try {
    showBlocks(main, SCREENS[screenName()](page.reply));
  } catch (error) {
    main.replaceChildren(make("p", {}, `This screen does not understand the status: ${error.message}`));
  }
}

function scopeOf(reply) {
  return Array.isArray(reply.namespaces) ? `, namespaces ${textOf(reply.namespaces.join(", "))}` : "";
}

function showWrong(status) {
  const wrong = recordsOf(status.wrong);
  const count = wrong.length === 1 ? "1 thing is wrong" : `${countOf(wrong.length)} things are wrong`;
  const box = at("wrong");
  box.hidden = false;
  box.classList.toggle("bad", wrong.length > 0);
  const isKnown = Array.isArray(status.wrong);
  setText(at("wrong-title"), wrong.length ? count : isKnown ? "Nothing is known to be wrong" : "What is wrong is not known");
  document.title = `${wrong.length ? `${count}: ` : ""}${screenName()}, Sparserow`;
  matchLength(at("wrong-list"), wrong.length, () => {
    const entry = make("li");
    entry.append(make("span"), make("code"));
    return entry;
  });
  wrong.forEach((alarm, index) => {
    const [text, mend] = at("wrong-list").children[index].children;
    setText(text, textOf(alarm.text));
    mend.hidden = !alarm.mend;
    setText(mend, textOf(alarm.mend).replaceAll("HOST:PORT", textOf(page.reply.coordinator)));
  });
}

// Times are counted here, and never by comparing the clock of this browser with that of the coordinator.
function showLink() {
  const link = at("link");
  link.hidden = !page.failure;
  const old = page.reply ? ` The figures are ${ageOf(secondsSince(page.repliedAt))} old.` : "";
  const since = ageOf(secondsSince(page.failedAt));
  setText(link, page.failure ? `No figures for ${since}: ${page.failure}. It is tried again.${old}` : "");
  const read = `Read ${ageOf(secondsSince(page.repliedAt))} ago; read anew every ${EVERY_MS / 1000} s while this page is visible.`;
  setText(at("age"), page.reply ? read : "");
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  page.token = at("token").value.trim();
  at("token").value = "";
  at("ask").hidden = true;
  read();
});
document.addEventListener("visibilitychange", read);
window.addEventListener("hashchange", () => {
  show();
  window.scrollTo(0, 0);
});
setInterval(() => isVisible() && showLink(), 1000);
show();
if (document.querySelector("meta[name=sparserow-token]").content === "needed") {
  askForToken("The coordinator asks for a token.");
} else {
  read();
}
