// In a search for an option, such as --for-mesh: the search takes a hyphen before a word as "without this word".
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input")) target.value = target.value.replace(/(^|\s)-+(?=\w)/g, "$1")
}, true)
