/* The command that continues an episode before one of its turns, with whoever pastes it as the model. */

/* The command is shown before it is copied: a paste acts at once, and the names in it may be a stranger's. */
function forkBox(run, episode, number) {
  const command = forkCommand(run, episode, number);
  if (!command) return null;
  const text = make("code", { text: command });
  const copy = button("copy", async () => {
    getSelection().selectAllChildren(text);
    const isCopied = await navigator.clipboard?.writeText(command).then(
      () => true,
      () => false,
    );
    copy.textContent = isCopied ? "copied" : "press Ctrl-C"; // a page in a notebook has no clipboard
  });
  return make("details.fork", make("summary", { text: "play from here" }), make(".fork-command", text, copy));
}

/* A terminal obeys control characters even within quotes, so there is no command for a name that holds one. */
function forkCommand(run, episode, number) {
  const id = episode.id.replace(/[*?[]/g, "[$&]"); // --id takes patterns
  const model = (run.manifest || {}).model === "starter" ? [] : ["--model", "recorded"];
  const registry = run.registry ? ["--registry", run.registry] : [];
  const turn = ["--fork", String(number - 1)];
  const words = ["python", "-m", "agents.replay", run.folder, `--id=${id}`, ...turn, ...model, ...registry];
  const command = words.map(shellQuoted).join(" ");
  return command === visible(command) && !/[\t\n]/.test(command) ? command : null;
}

function shellQuoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}
