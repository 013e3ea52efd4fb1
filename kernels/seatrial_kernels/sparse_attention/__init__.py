"""DeepSeek sparse attention: an indexer picks the compressed entries that a query may see."""
