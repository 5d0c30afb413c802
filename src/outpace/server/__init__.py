"""The HTTP server: OpenAI's API, Anthropic's messages and Ollama's, over one engine that batches all of them.

work.py steps the engine in a thread of its own; asking.py turns a request's fields into answers in the making; chat.py,
completions.py and the others speak one API each; guard.py lets requests in; app.py puts all together.
"""
