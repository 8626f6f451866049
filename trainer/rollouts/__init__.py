"""Where a step's groups come from: live episodes, or a recording."""
