// The search of mkdocs-material runs in a worker, and browsers start no worker for a page that is opened from the file
// system. There, this file puts a hidden frame in its place, which runs the same script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      const base = new URL(url, location.href)
      const load = (from) => new Promise((loaded, failed) => {
        const script = this.inside.document.createElement("script")
        script.src = new URL(from, base)
        script.onload = loaded
        script.onerror = () => failed(new Error(`cannot load ${script.src}`))
        this.inside.document.body.append(script)
      })
      this.inside.importScripts = async (...urls) => {
        for (const each of urls) await load(each)
      }
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = load(base)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
