"""The policy network: one forward pass for every supported architecture, and the bundled starter model."""

from pathlib import Path

#: The checkpoint folder of the bundled starter model; `starter` made it.
STARTER_PATH = Path(__file__).with_name("starter")
