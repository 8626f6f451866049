"""How the bundled model is made: its architecture, its lessons and its recipe. Not in the wheel."""
