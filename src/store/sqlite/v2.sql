-- Version 2: a fork reads what lies before it from its parent. JSON: {seq, revision}.
ALTER TABLE runs ADD COLUMN base TEXT;
