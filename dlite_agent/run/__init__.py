"""`dlite-agent run`: a person or a script, an agent, and a thread that can be stopped, undone, forked and resumed.

`loop` decides what happens next and says it as events; `terminal_view` and `json_view` show them; `inputs` reads what
is typed or sent; `history` is the thread as LangGraph's checkpoints have it; `opening` puts it all together.
"""
