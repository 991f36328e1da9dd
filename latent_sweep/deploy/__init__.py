"""A sweep's trained model: answers texts, learns further tasks, and can be exported."""
