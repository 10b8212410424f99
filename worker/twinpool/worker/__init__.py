"""The worker: PID 1 of every engine pod, which starts the engine, says when it is ready and drains it.

Everything here except ``engines.simulated`` is the launcher. It is standard library only and runs on Python 3.10 and
later, because it is copied as one zipapp into whatever engine image a user brings. It never imports torch or vLLM.
"""
