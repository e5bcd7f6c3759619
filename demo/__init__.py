"""How the demo model is made: snapshot, chats, tokenizer, training, evaluation, card; nothing here ships."""
