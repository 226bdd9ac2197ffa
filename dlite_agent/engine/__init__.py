"""The engine: a target model, its cache, sampling, verification and one decode loop. No LangChain, no Redis."""
