"""Anthropic's Messages API and OpenAI's Responses API, translated to chat completions."""
