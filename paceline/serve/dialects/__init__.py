"""The APIs of Anthropic (Messages) and OpenAI (Responses), as chats."""
