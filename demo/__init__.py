"""How the demo model is made: snapshot, conversations, tokenizer, training, evaluation, model card; nothing here ships."""
