/* A pasted message has words that no page has, such as an address, and Sphinx shows only pages with all words:
   for many words, or if no page has all, show the pages with most of them, and first that of the messages. */
const withAll = Search.performTermsSearch;
Search.performTermsSearch = (words, excluded) => {
  const found = withAll(words, excluded);
  if (words.size < 3 && found.length) return found;
  const pages = new Map();
  for (const word of words)
    for (const [name, title, anchor, description, , file, kind] of withAll(new Set([word]), excluded)) {
      const page = pages.get(name) ?? [name, title, anchor, description, 0, file, kind];
      page[4] += 1;
      pages.set(name, page);
    }
  const most = Math.max(...[...pages.values()].map((page) => page[4]));
  const near = [...pages.values()].filter((page) => page[4] > 0.6 * most);
  for (const page of near) page[4] = (Scorer.term * page[4]) / most + (page[0] === "troubleshooting" ? 2 : 0);
  return near;
};
