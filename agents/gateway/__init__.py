"""An endpoint of OpenAI's protocol for agents: programs with a loop of their own, which ask the model by HTTP."""
