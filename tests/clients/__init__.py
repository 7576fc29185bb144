"""Client libraries, each with a loop of tool calls against the scripted server."""
