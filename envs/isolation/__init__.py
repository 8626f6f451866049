"""Code that may hang, crash or eat memory: threads that can be left behind, processes that can be killed."""
