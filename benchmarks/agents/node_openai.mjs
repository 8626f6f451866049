// An agent of Node's `openai`: its runTools has the loop. It checks sums with a tool, then answers.
import { createInterface } from "node:readline";
import OpenAI from "openai";

const [line] = await new Promise((done) => {
  const lines = [];
  createInterface({ input: process.stdin }).on("line", (each) => lines.push(each)).on("close", () => done(lines));
});
const task = JSON.parse(line);
const runner = new OpenAI().chat.completions.runTools(
  {
    model: "policy",
    messages: task.messages,
    tools: [
      {
        type: "function",
        function: {
          name: "zoom",
          description: "Show a part of the picture enlarged.",
          parse: JSON.parse,
          parameters: {
            type: "object",
            properties: {
              left: { type: "integer" },
              top: { type: "integer" },
              right: { type: "integer" },
              bottom: { type: "integer" },
            },
            required: ["left", "top", "right", "bottom"],
          },
          function: (box) => `nothing but lines in ${JSON.stringify(box)}`,
        },
      },
    ],
  },
  { maxChatCompletions: 4 },
);
console.log(await runner.finalContent());
